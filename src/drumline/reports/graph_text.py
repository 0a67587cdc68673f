"""The data-flow graph of a model as text, readable in 40 columns, and as a JSON document."""

from __future__ import annotations

from typing import Any

from ..clusters import Cluster
from ..core.units import format_bytes, format_count, format_seconds
from ..costs.rank_model import LayerMessage
from .console import wrap
from .graph_view import BATCH, OUTSIDE, GraphEdge, GraphNode, GraphView, boundaries

MOST_NODES = 60
"""Nodes of a drawing; of more, the first two thirds and the last third are shown."""


MOST_INPUTS = 6
"""Inputs of a node; of more, the rest is one line."""


def graph_lines(view: GraphView, *, width: int) -> list[str]:
    """One paragraph per node: its name and amounts, then the values that it reads."""
    shown = chosen(len(view.nodes), MOST_NODES)
    starts = boundaries(view)
    lines: list[str] = []
    before = -1
    for k in shown:
        if k != before + 1:
            lines += ["", f"... {k - before - 1} nodes left out ...", ""]
        if k in starts:
            lines += _stage_lines(view, starts[k], width)
        lines += _node_lines(view, view.nodes[k], width)
        before = k
    return lines


def chosen(count: int, most: int) -> list[int]:
    """The nodes that are shown: all, or the first and the last."""
    if count <= most:
        return list(range(count))
    tail = most // 3
    return [*range(most - tail), *range(count - tail, count)]


def _node_lines(view: GraphView, node: GraphNode, width: int) -> list[str]:
    times = f" x{node.repeats}" if node.repeats > 1 else ""
    kind = f"  {node.kind}" if node.kind and node.kind != node.label else ""
    lines = wrap(f"{node.label}{times}{kind}", width)
    edges = node.edges if len(node.edges) <= MOST_INPUTS else node.edges[: MOST_INPUTS - 1]
    for edge in edges:
        skip = " (skip)" if edge.skips else ""
        lines += wrap(f"  <- {format_bytes(edge.bytes)} {source_name(view, edge)}{skip}", width, indent=5)
    if rest := node.edges[len(edges) :]:
        lines += wrap(f"  <- {format_bytes(sum(e.bytes for e in rest))} {len(rest)} other nodes", width, indent=5)
    count = len(node.operators) * node.repeats
    amounts = f"work {format_count(node.work, 'FLOP')}, depth {format_count(node.depth)}"
    many = f"{count} operators, " if count > 1 else ""
    lines += wrap(f"  {many}{amounts}", width, indent=2)
    if node.tied:
        more = f" and {len(node.tied) - 1} more" if len(node.tied) > 1 else ""
        lines += wrap(f"  tied: also reads {node.tied[0]}{more}", width, indent=2)
    for text in message_texts(view, node):
        lines += wrap(f"  {text}", width, indent=4)
    return lines


def source_name(view: GraphView, edge: GraphEdge) -> str:
    """The node that an edge begins at."""
    if edge.source == BATCH:
        return "batch"
    if edge.source == OUTSIDE:
        return "other layers"
    node = view.nodes[edge.source]
    return node.label


def message_texts(view: GraphView, node: GraphNode) -> list[str]:
    """The collectives of a node under the plan, one line per axis, phase and collective; of one of its repeats."""
    return [
        f"{axis} {phase}: {count} {collective}, {format_bytes(size)}"
        for axis, phase, collective, count, size in message_rows(view, node)
    ]


def message_rows(view: GraphView, node: GraphNode) -> list[tuple[str, str, str, int, float]]:
    """(axis, phase, collective, number, bytes) of a node's messages, those of the forward first."""
    if view.cuts is None or view.layer:
        return []
    sums: dict[tuple[str, str, str], list[float]] = {}
    for message, size in _messages(view, node):
        sums.setdefault((message.axis, message.phase, message.collective), []).append(size)
    rows = [(*key, len(sizes), sum(sizes)) for key, sizes in sums.items()]
    return sorted(rows, key=lambda row: row[1] != "forward")


def _messages(view: GraphView, node: GraphNode) -> tuple[tuple[LayerMessage, float], ...]:
    assert view.cuts is not None
    first = next((k for k in view.nodes if k.layer == node.layer), node)
    return view.cuts.messages.get(node.layer, ()) if first is node else ()


def _stage_lines(view: GraphView, stage: int, width: int) -> list[str]:
    """A line across the graph, and what the stages before send over it."""
    assert view.cuts is not None
    head = f"-- stage {stage} "
    lines = [head + "-" * max(0, min(width, 60) - len(head))]
    for t in view.cuts.transfers:
        if t.dst == stage:
            values = "1 value" if t.values == 1 else f"{t.values} values"
            far = ", past the stages between" if t.skips else ""
            lines += wrap(f"   receives {format_bytes(t.bytes)} ({values}) from stage {t.src}{far}", width, indent=3)
    return lines


def graph_totals(view: GraphView, cluster: Cluster | None) -> list[str]:
    """Work, depth and average parallelism of the forward, and what fusing elementwise chains would save."""
    count, depth = len(view.flow.operators), view.tasks.depth
    lines = [
        f"forward: {count} operators, {view.longest_chain} on the longest chain",
        f"work {format_count(view.work, 'FLOP')}, depth {format_count(depth)}, average parallelism "
        f"{format_count(view.work / depth) if depth else '-'}",
    ]
    profile, n = view.profile, view.samples
    both, whole = profile.flops().at(n), profile.depth.at(n)
    if whole:
        lines.append(
            f"with the backward: work {format_count(both, 'FLOP')}, depth {format_count(whole)}, average "
            f"parallelism {format_count(both / whole)}"
        )
    return [*lines, fusion_text(view, cluster)]


def fusion_text(view: GraphView, cluster: Cluster | None) -> str:
    """Savings of fusing elementwise chains of the forward."""
    if not view.chains:
        return "fusion: no elementwise operator reads the result of another one; nothing to fuse in the forward"
    saved = view.fused_bytes
    moved = sum(op.bytes.at(view.samples) for op in view.flow.operators)
    text = (
        f"fusion: {len(view.chains)} elementwise chains as one kernel each would save {format_bytes(saved)} of "
        f"{format_bytes(moved)} that the forward moves, and {view.fused_kernels} kernels"
    )
    if cluster is None:
        return f"{text} (--cluster NAME shows the time)"
    seconds = saved / cluster.device.bandwidth
    return f"{text}: {format_seconds(seconds)} at the memory bandwidth of {cluster.device.name}"


def chain_lines(view: GraphView, most: int = 5) -> list[str]:
    """The chains that save most, equal ones together."""
    sums: dict[str, tuple[int, float]] = {}
    for chain in view.chains:
        name = chain_name(view, chain.operators)
        count, size = sums.get(name, (0, 0.0))
        sums[name] = count + 1, size + chain.bytes.at(view.samples)
    rows = sorted(sums.items(), key=lambda row: -row[1][1])
    lines = [f"  {format_bytes(size)}: {name}" + (f" (x{k})" if k > 1 else "") for name, (k, size) in rows[:most]]
    return lines + ([f"  and {len(rows) - most} other kinds of chains"] if len(rows) > most else [])


def chain_name(view: GraphView, operators: tuple[int, ...]) -> str:
    """`add, relu`: the operators of a chain, at most six."""
    names = [view.flow.operators[i].name for i in operators]
    return ", ".join(names[:6]) + (f", ... ({len(names)})" if len(names) > 6 else "")


def graph_document(view: GraphView, cluster: Cluster | None) -> dict[str, Any]:
    """The JSON document: all nodes and edges, folded ones once."""
    nodes = [
        {
            "name": node.label,
            "kind": node.kind,
            "layer": node.layer,
            "repeats": node.repeats,
            "operators": [view.flow.operators[i].name for i in node.operators],
            "work": node.work,
            "depth": node.depth,
            "stage": node.stage,
            "tied": list(node.tied),
            "reads": [{"from": source_name(view, e), "bytes": e.bytes, "skips": e.skips} for e in node.edges],
        }
        for node in view.nodes
    ]
    depth, saved = view.tasks.depth, view.fused_bytes
    document: dict[str, Any] = {
        "samples": view.samples,
        "nodes": nodes,
        "operators": len(view.flow.operators),
        "longest_chain": view.longest_chain,
        "work": view.work,
        "depth": depth,
        "average_parallelism": view.work / depth if depth else None,
        "fusion": {
            "chains": [
                {"operators": [view.flow.operators[i].name for i in c.operators], "bytes": c.bytes.at(view.samples)}
                for c in view.chains
            ],
            "bytes": saved,
            "kernels": view.fused_kernels,
            "seconds": saved / cluster.device.bandwidth if cluster else None,
        },
    }
    if (cuts := view.cuts) is not None:
        document["plan"] = {
            "plan": str(cuts.plan),
            "samples": cuts.samples,
            "transfers": [{"from": t.src, "to": t.dst, "values": t.values, "bytes": t.bytes} for t in cuts.transfers],
            "messages": {
                layer: [{"axis": m.axis, "phase": m.phase, "collective": m.collective, "bytes": b} for m, b in own]
                for layer, own in cuts.messages.items()
            },
            "notes": list(cuts.notes),
        }
    return document
