"""The data flow of a model as a graph to look at: operators grouped by layer or module, and the bytes between them.

Layers that are equal, follow each other and pass their values alike are one node (`blocks.0-11 x12`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from ..core.errors import InputError, nearest
from ..costs.fusion import FusedChain
from ..costs.graph_cuts import GraphCuts
from ..models.data_flow import DataFlow, FlowOperator
from ..models.profile import Profile
from ..theory.work_depth import TaskGraph

BATCH = -1
"""The source of edges from the batch."""
MOST_BETWEEN = 3
"""Operators between two layers that are shown one by one; more are one node, such as those that make a mask."""
OUTSIDE = -2
"""The source of edges from nodes that are not shown."""


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Values that one node reads from another, for the samples of the view."""

    source: int
    """Number of the node that wrote them; BATCH or OUTSIDE."""
    bytes: float
    skips: bool = False
    """Whether nodes lie between the two."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A layer, a module or an operator."""

    label: str
    kind: str
    """The class of a layer; the kind of an operator."""
    operators: tuple[int, ...]
    """Their numbers in the data flow; of a folded node, those of its first repeat."""
    work: float
    """Operations of the forward; of all repeats."""
    depth: float
    """The longest chain of dependent operations inside; of all repeats."""
    edges: tuple[GraphEdge, ...] = ()
    tied: tuple[str, ...] = ()
    """Parameters that an earlier layer reads, too."""
    repeats: int = 1
    stage: int = 0
    layer: str = ""


@dataclass(frozen=True, slots=True)
class GraphView:
    """The nodes to draw, in the order in which they run."""

    profile: Profile
    flow: DataFlow
    samples: float
    nodes: tuple[GraphNode, ...]
    chains: tuple[FusedChain, ...]
    cuts: GraphCuts | None = None
    layer: str = ""
    """The one layer that is shown, if not all are."""
    tasks: TaskGraph = field(default_factory=lambda: TaskGraph((), ()))
    """The operators, each with its depth."""

    @property
    def work(self) -> float:
        """Operations of the forward."""
        return sum(op.flops.at(self.samples) for op in self.flow.operators)

    @property
    def longest_chain(self) -> int:
        """Operators on the longest chain of dependent operators."""
        return round(replace(self.tasks, times=(1.0,) * len(self.flow.operators)).depth)

    @property
    def fused_bytes(self) -> float:
        """Bytes that fused elementwise chains would not move."""
        return sum(c.bytes.at(self.samples) for c in self.chains)

    @property
    def fused_kernels(self) -> int:
        """Kernels that fused elementwise chains would not launch."""
        return sum(len(c.operators) - 1 for c in self.chains)


def graph_view(
    profile: Profile,
    flow: DataFlow,
    chains: tuple[FusedChain, ...],
    *,
    n: float,
    depth: int = 1,
    layer: str | None = None,
    cuts: GraphCuts | None = None,
) -> GraphView:
    """Group the operators: by layer (`depth` 1), by modules inside of layers (2, 3, ...), or those of one layer."""
    if depth < 1:
        raise InputError(f"--depth {depth}", rule="1 shows layers, 2 the modules inside of them, and so on")
    if layer is not None:
        known = list(dict.fromkeys(op.layer for op in flow.operators))
        if layer not in known:
            shown = ", ".join(name or "(model)" for name in known[:8]) + (", ..." if len(known) > 8 else "")
            raise InputError(f"--layer {layer}: no such layer", rule=f"one of {shown}", fix=nearest(layer, known))
    stages = [cuts.stage(i) if cuts else 0 for i in range(len(flow.operators))]
    groups = _groups(flow.operators, stages, depth, layer)
    nodes = _nodes(profile, flow, groups, stages, n)
    nodes = _numbered(_folded(nodes) if depth == 1 and layer is None else nodes)
    tasks = TaskGraph(tuple(op.depth for op in flow.operators), flow.needs)
    return GraphView(profile, flow, n, tuple(nodes), chains, cuts, layer or "", tasks)


def _groups(operators: tuple[FlowOperator, ...], stages: list[int], depth: int, layer: str | None) -> list[list[int]]:
    """Runs of operators of one group; a layer that runs twice, or around others, has several."""
    if layer is not None:
        return [[i] for i, op in enumerate(operators) if op.layer == layer]

    def key(i: int) -> tuple[object, ...]:
        op = operators[i]
        inside = op.module.removeprefix(op.layer).strip(".").split(".") if op.layer and op.module else []
        return op.layer, tuple(inside[: depth - 1]), stages[i]

    groups = []
    for _, members in groupby(range(len(operators)), key):
        run = list(members)
        apart = not operators[run[0]].layer and (len(run) <= MOST_BETWEEN or depth > 1)
        groups += [[i] for i in run] if apart else [run]
    return groups


def _nodes(profile: Profile, flow: DataFlow, groups: list[list[int]], stages: list[int], n: float) -> list[GraphNode]:
    kinds = {x.name: x.kind for x in profile.layers}
    home = {i: k for k, group in enumerate(groups) for i in group}
    seen: dict[str, str] = {}
    """Parameter -> the first layer that reads it."""
    nodes = []
    for k, group in enumerate(groups):
        first = flow.operators[group[0]]
        single = len(group) == 1 and (not first.layer or len(groups) == 1 or _is_alone(flow, groups, k))
        names = dict.fromkeys(name for i in group for name in flow.operators[i].parameters)
        tied = tuple(name for name in names if seen.setdefault(name, first.layer) != first.layer)
        nodes.append(
            GraphNode(
                label=_label(flow, group, single),
                kind=first.kind if single else _class(flow, group, kinds),
                operators=tuple(group),
                work=sum(flow.operators[i].flops.at(n) for i in group),
                depth=_depth(flow, group),
                edges=_edges(flow, group, home, k, n),
                tied=tied,
                stage=stages[group[0]],
                layer=first.layer,
            )
        )
    return nodes


def _class(flow: DataFlow, group: list[int], kinds: dict[str, str]) -> str:
    """The class of a layer; modules inside of layers have none in a profile."""
    layer = flow.operators[group[0]].layer
    return kinds.get(layer, "") if layer and _label(flow, group, False) == layer else ""


def _is_alone(flow: DataFlow, groups: list[list[int]], k: int) -> bool:
    """Whether all groups are single operators of one layer: that layer is shown operator by operator."""
    return all(len(g) == 1 for g in groups) and len({flow.operators[g[0]].layer for g in groups}) == 1


def _label(flow: DataFlow, group: list[int], single: bool) -> str:
    first = flow.operators[group[0]]
    if single:
        inside = first.module.removeprefix(first.layer).strip(".") if first.layer else ""
        return f"{first.name} ({inside})" if inside else first.name
    modules = {flow.operators[i].module for i in group}
    if not first.layer:
        return f"{first.module or 'model'} ({len(group)} operators)"
    if len(modules) == 1 and first.module.startswith(f"{first.layer}."):
        return first.module
    return first.layer


def _depth(flow: DataFlow, group: list[int]) -> float:
    """The longest chain inside of a group."""
    ends: dict[int, float] = {}
    for i in group:
        ends[i] = flow.operators[i].depth + max((ends.get(j, 0.0) for j in flow.needs[i]), default=0.0)
    return max(ends.values(), default=0.0)


def _edges(flow: DataFlow, group: list[int], home: dict[int, int], k: int, n: float) -> tuple[GraphEdge, ...]:
    """Bytes that a group reads from each other one; of each value at most the whole, however many operators read it."""
    parts: dict[int, float] = defaultdict(float)
    for i in group:
        for value, part in flow.read_by[i]:
            parts[value] = min(parts[value] + part.at(n), flow.values[value].bytes.at(n))
    sums: dict[int, float] = defaultdict(float)
    for value, size in parts.items():
        writer = flow.values[value].writer
        source = BATCH if writer < 0 else home.get(writer, OUTSIDE)
        if source != k:
            sums[source] += size
    return tuple(GraphEdge(source, size, 0 <= source < k - 1) for source, size in sorted(sums.items()))


# ---- equal neighbours


def _folded(nodes: list[GraphNode]) -> list[GraphNode]:
    """Runs of equal nodes as one, where each reads from the one before alone, or all read from the same nodes."""
    used = defaultdict(set)
    for k, node in enumerate(nodes):
        for edge in node.edges:
            used[edge.source].add(k)
    runs: list[list[int]] = []
    for k, node in enumerate(nodes):
        last = runs[-1][-1] if runs else None
        if last is not None and used[last] == {k} and _equal(nodes, runs[-1], node, k):
            runs[-1].append(k)
        else:
            runs.append([k])
    place = {k: i for i, run in enumerate(runs) for k in run}
    return [_merged([nodes[k] for k in run], place, i) for i, run in enumerate(runs)]


def _equal(nodes: list[GraphNode], run: list[int], node: GraphNode, k: int) -> bool:
    first = nodes[run[0]]
    alike = (first.kind, first.stage, first.work, first.depth, len(first.operators), first.tied)
    if alike != (node.kind, node.stage, node.work, node.depth, len(node.operators), node.tied):
        return False
    if _parent(first) != _parent(node) or not _number(first).isdigit() or not _number(node).isdigit():
        return False
    before = {e.source: e.bytes for e in nodes[run[-1]].edges}
    chain = next((e.bytes for e in nodes[run[-1]].edges if e.source == run[-1] - 1), None)
    for edge in node.edges:
        if edge.source == k - 1:
            if len(run) > 1 and chain != edge.bytes:
                return False
        elif before.get(edge.source) != edge.bytes:
            return False
    return any(e.source == k - 1 for e in node.edges) and len(node.edges) == len(nodes[run[0]].edges)


def _parent(node: GraphNode) -> str:
    return node.label.rpartition(".")[0]


def _number(node: GraphNode) -> str:
    return node.label.rpartition(".")[2]


def _merged(run: list[GraphNode], place: dict[int, int], k: int) -> GraphNode:
    first, count = run[0], len(run)
    edges = tuple(
        replace(e, source=place.get(e.source, e.source), skips=0 <= place.get(e.source, -1) < k - 1)
        for e in first.edges
    )
    if count == 1:
        return replace(first, edges=edges)
    head = _parent(first)
    label = f"{head}.{_number(first)}-{_number(run[-1])}" if head else f"{_number(first)}-{_number(run[-1])}"
    return replace(first, label=label, edges=edges, repeats=count, work=count * first.work, depth=count * first.depth)


def _numbered(nodes: list[GraphNode]) -> list[GraphNode]:
    """Nodes of the same name get numbers, so that edges can name them: `cat`, `cat #2`."""
    seen: dict[str, int] = defaultdict(int)
    made = []
    for node in nodes:
        seen[node.label] += 1
        count = seen[node.label]
        made.append(replace(node, label=f"{node.label} #{count}") if count > 1 else node)
    return made


def boundaries(view: GraphView) -> dict[int, int]:
    """Stage boundaries: the node that begins a stage -> the stage."""
    starts = {}
    for k, (a, b) in enumerate(pairwise(view.nodes), 1):
        if a.stage != b.stage:
            starts[k] = b.stage
    return starts
