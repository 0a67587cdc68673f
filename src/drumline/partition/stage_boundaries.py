"""Chooses where pipeline stages begin: at modules with parameters, so that the slowest stage is as fast as possible.

Costs of stages are counted from operators, or measured (see `BoundaryPrices`); the search is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.fx import Graph, Node

from ..core.errors import PlanError, nearest
from .stage_cutting import cut_into_stages, graph_operators
from .weight_matmuls import weight_matmul

FLOPS_PER_BYTE = {"cpu": 80.0, "cuda": 1000.0}
"""Cost of a byte between two stages, in operations, by kind of device, where the machine is unknown. docs/pipelines.md
has values of machines, and how little depends on them."""

FORWARD_AND_BACKWARD = 3.0
"""Operations of forward and backward, per operation of the forward."""
SLACK = 1.05
"""The slowest stage may be slower than the optimum by this factor, if that sends fewer bytes."""

Key = tuple[str, int]
"""A module, and the index of its call."""


@dataclass(frozen=True, slots=True)
class StageEntry:
    """A position where a stage may begin."""

    key: Key
    position: int
    """Index among `graph_operators(graph)`."""


@dataclass(frozen=True, slots=True)
class BoundaryPrices:
    """Costs by which boundaries are chosen, all in one unit: operations or seconds."""

    segments: tuple[float, ...] = ()
    """Cost of the operators up to the first entry, from there to the second, and so on; empty: counted."""
    per_byte: float = FLOPS_PER_BYTE["cpu"]
    """Cost of a byte sent to a later stage."""


def stage_entries(graph: Graph, holders: set[str]) -> list[StageEntry]:
    """Positions of the first operators of modules with parameters (`holders`), nested ones too."""
    places: list[StageEntry] = []
    calls: dict[str, int] = {}
    before: tuple[str, ...] = ()
    for i, node in enumerate(graph_operators(graph)):
        stack = tuple(node.meta.get("nn_module_stack", ()))
        common = 0
        while common < min(len(stack), len(before)) and stack[common] == before[common]:
            common += 1
        new = [name for name in stack[common:] if name in holders]
        for name in new:
            calls[name] = calls.get(name, -1) + 1
        if new and i:
            places.append(StageEntry((new[0], calls[new[0]]), i))
        before = stack
    return places


def modules_with_parameters(names: Sequence[str]) -> set[str]:
    """Modules that have a parameter, directly or in a submodule."""
    modules = set()
    for name in names:
        path = name.split(".")[:-1]
        modules |= {".".join(path[:k]) for k in range(1, len(path) + 1)}
    return modules


def boundaries_by_name(graph: Graph, names: Sequence[str], holders: set[str]) -> list[Key]:
    """Boundaries given by the plan: the modules that begin a stage."""
    places = {e.key[0]: e for e in stage_entries(graph, holders) if e.key[1] == 0}
    first_operator: dict[str, int] = {}
    for i, node in enumerate(graph_operators(graph)):
        for name in node.meta.get("nn_module_stack", ()):
            first_operator.setdefault(name, i)
    chosen = []
    for name in names:
        if name not in first_operator:
            raise PlanError(
                f"split={name}: the model runs no module of this name",
                rule="split names modules that run, each of which begins a stage",
                fix=nearest(name, places),
            )
        if name not in places:
            at = first_operator[name]
            same = [e for e in stage_entries(graph, holders) if e.position == at]
            if not same:
                raise PlanError(f"split={name}: no stage can begin there", fix=nearest(name, places))
            places[name] = same[0]
        chosen.append(places[name])
    order = [e.position for e in chosen]
    if order != sorted(set(order)):
        raise PlanError(f"split={'+'.join(names)}", rule="the modules are named in the order in which they run")
    return [e.key for e in chosen]


def balanced_boundaries(
    graph: Graph, stages: int, holders: set[str], prices: BoundaryPrices | None = None
) -> list[Key]:
    """Boundaries that make the slowest stage about as fast as possible; every stage has a parameter of its own."""
    prices, places = prices or BoundaryPrices(), stage_entries(graph, holders)
    nodes = graph_operators(graph)
    weights = [1.0 if _reads_parameter(n) else 0.0 for n in nodes]
    ends = [0, *(e.position for e in places), len(nodes)]
    layers = sum(any(weights[a:b]) for a, b in pairwise(ends))
    if layers < stages:
        raise PlanError(
            f"{stages} stages for a model of {layers} layer{'s' if layers != 1 else ''} with parameters",
            rule=f"every stage has a layer of its own: {stages} > {layers}",
            fix=f"pp x virtual = {layers} or less",
        )
    price = _by_operator(prices, ends) if prices.segments else [FORWARD_AND_BACKWARD * flops_estimate(n) for n in nodes]
    sums, owns = ([0.0, *accumulate(numbers)] for numbers in (price, weights))
    sends = [prices.per_byte * size for size in _crossing(graph, nodes)]

    def chosen(among: Sequence[StageEntry]) -> list[StageEntry]:
        return [among[i] for i in _best([e.position for e in among], stages, sums, owns, sends, len(nodes))]

    best = chosen(places)
    if not _can_be_cut(graph, [e.position for e in best]):
        allowed = set(cuttable_positions(graph, holders))
        best = chosen([e for e in places if e.position in allowed]) or best  # the rest is refused by cut_into_stages
    return [e.key for e in best]


def cuttable_positions(graph: Graph, holders: set[str]) -> list[int]:
    """Entries at which a stage can begin: no number and no in-place write crosses them."""
    at = [e.position for e in stage_entries(graph, holders)]
    return at if _can_be_cut(graph, at) else [b for b in at if _can_be_cut(graph, [b])]


def _can_be_cut(graph: Graph, at: Sequence[int]) -> bool:
    try:
        cut_into_stages(graph, at)
    except PlanError:
        return False
    return True


def _by_operator(prices: BoundaryPrices, ends: Sequence[int]) -> list[float]:
    """Each segment's cost at its first operator: stages begin nowhere else."""
    costs = [0.0] * ends[-1]
    for start, price in zip(ends, prices.segments, strict=False):  # `ends` has the end of the last one too
        costs[start] = price
    return costs


def _best(
    at: Sequence[int], stages: int, sums: Sequence[float], owns: Sequence[float], sends: Sequence[float], end: int
) -> list[int]:
    """Indices into `at`: first minimise the time of the slowest stage, then the bytes sent at about that time.

    Messages overlap with computation: one costs time only if it takes longer than its sender computes.
    """
    starts = [0, *at, end]
    sent = [sends[b] if b < end else 0.0 for b in starts]

    def price(i: int, j: int) -> float:
        return max(sums[starts[j]] - sums[starts[i]], sent[j])

    allowed = [[j for j in range(i + 1, len(starts)) if owns[starts[j]] > owns[starts[i]]] for i in range(len(starts))]
    fastest = _shortest(stages, allowed, lambda so_far, i, j: (max(so_far[0], price(i, j)),))
    if fastest is None:
        return []
    limit = SLACK * fastest[0][0]

    def fewest(so_far: tuple[float, ...], i: int, j: int) -> tuple[float, ...] | None:
        slowest = max(so_far[1], price(i, j))
        return (so_far[0] + sent[j], slowest) if slowest <= limit else None

    best = _shortest(stages, allowed, fewest)
    assert best is not None, "the fastest path is within the limit"
    return [i - 1 for i in best[1]]


Sums = tuple[float, ...]


def _shortest(
    stages: int, allowed: Sequence[Sequence[int]], add: Callable[[Sums, int, int], Sums | None]
) -> tuple[Sums, tuple[int, ...]] | None:
    """The smallest sums over `stages` stages from the first start to the last, and where they begin: by dynamic
    programming.

    `allowed[i]`: where a stage that begins at i may end. `add` gives the sums with one more stage, or None.
    """
    last = len(allowed) - 1
    table: dict[int, tuple[Sums, tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
    for k in range(stages):
        new: dict[int, tuple[Sums, tuple[int, ...]]] = {}
        for i, (so_far, begins) in table.items():
            for j in allowed[i]:
                if (j == last) != (k == stages - 1):
                    continue
                sums = add(so_far, i, j)
                if sums is not None and (j not in new or sums < new[j][0]):
                    new[j] = sums, (*begins, j)
        table = new
    return (table[last][0], table[last][1][:-1]) if last in table else None


def boundary_positions(graph: Graph, keys: Sequence[Key], holders: set[str]) -> list[int]:
    """Positions of boundaries in a graph."""
    places = {e.key: e.position for e in stage_entries(graph, holders)}
    for name, call in keys:
        if (name, call) not in places:
            raise PlanError(f"a stage begins at call {call} of {name}, which does not run for this batch")
    return [places[key] for key in keys]


def flops_estimate(node: Node) -> float:
    """Approximate operations of a node: matmuls by their sizes, others by their values."""
    val = node.meta.get("val")
    if isinstance(val, list | tuple):
        val = val[0] if val and isinstance(val[0], torch.Tensor) else None
    if not isinstance(val, torch.Tensor):
        return 0.0
    w = weight_matmul(node)
    if w is not None and w.reduced_dim is not None and w.feature_dim is not None:
        weight: torch.Tensor = w.weight.meta["val"]
        return 2.0 * val.numel() * weight.numel() / weight.shape[w.feature_dim]
    if any(word in str(node.target) for word in ("attention", "matmul", "bmm")):
        other = node.args[1] if len(node.args) > 1 else None
        shape: tuple[int, ...] = tuple(other.meta["val"].shape) if isinstance(other, Node) else ()
        return 2.0 * val.numel() * (shape[-2] if len(shape) > 1 else 1)
    return float(val.numel())


def _reads_parameter(node: Node) -> bool:
    return any(a.op == "placeholder" and a.meta.get("trained") for a in node.all_input_nodes)


def _crossing(graph: Graph, nodes: Sequence[Node]) -> list[float]:
    """Bytes that a boundary before each operator would send."""
    place = {n: i for i, n in enumerate(nodes)}
    changes = [0.0] * (len(nodes) + 2)
    for node in nodes:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            continue
        last = max((place.get(u, len(nodes)) for u in node.users), default=place[node])
        changes[place[node] + 1] += val.numel() * val.element_size()
        changes[last + 1] -= val.numel() * val.element_size()
    total, sent = 0.0, []
    for c in changes:
        total += c
        sent.append(total)
    return sent
