"""Where the stages of a pipeline begin: at modules with parameters, so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from ..errors import PlanError, nearest
from .stages import operators
from .weights import weighing

FLOPS_PER_BYTE = 50.0
"""What a byte between two stages costs, in operations."""

Key = tuple[str, int]
"""A module, and which of its calls."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A place where a stage may begin."""

    key: Key
    position: int
    """Among `operators(graph)`."""


def entries(graph: Graph, holders: set[str]) -> list[Entry]:
    """The first operators of modules that have parameters (`holders`), also in their own modules; outermost names."""
    found: list[Entry] = []
    calls: dict[str, int] = {}
    before: tuple[str, ...] = ()
    for i, node in enumerate(operators(graph)):
        stack = tuple(node.meta.get("nn_module_stack", ()))
        common = 0
        while common < min(len(stack), len(before)) and stack[common] == before[common]:
            common += 1
        new = [name for name in stack[common:] if name in holders]
        for name in new:
            calls[name] = calls.get(name, -1) + 1
        if new and i:
            found.append(Entry((new[0], calls[new[0]]), i))
        before = stack
    return found


def holders_of(names: Sequence[str]) -> set[str]:
    """The modules that have a parameter, or a module that has one."""
    found = set()
    for name in names:
        path = name.split(".")[:-1]
        found |= {".".join(path[:k]) for k in range(1, len(path) + 1)}
    return found


def by_name(graph: Graph, names: Sequence[str], holders: set[str]) -> list[Key]:
    """Boundaries by hand: the modules that begin a stage."""
    places = {e.key[0]: e for e in entries(graph, holders) if e.key[1] == 0}
    deeper: dict[str, int] = {}
    for i, node in enumerate(operators(graph)):
        for name in node.meta.get("nn_module_stack", ()):
            deeper.setdefault(name, i)
    chosen = []
    for name in names:
        if name not in deeper:
            raise PlanError(
                f"split={name}: the model runs no module of this name",
                rule="split names modules that run, each of which begins a stage", fix=nearest(name, places),
            )  # fmt: skip
        if name not in places:
            at = deeper[name]
            same = [e for e in entries(graph, holders) if e.position == at]
            if not same:
                raise PlanError(f"split={name}: no stage can begin there", fix=nearest(name, places))
            places[name] = same[0]
        chosen.append(places[name])
    order = [e.position for e in chosen]
    if order != sorted(set(order)):
        raise PlanError(f"split={'+'.join(names)}", rule="the modules are named in the order in which they run")
    return [e.key for e in chosen]


def balanced(graph: Graph, stages: int, holders: set[str], costs: Mapping[Node, float] | None = None) -> list[Key]:
    """Boundaries such that the most expensive stage is cheapest; every stage has a parameter of its own."""
    places = entries(graph, holders)
    nodes = operators(graph)
    weights = [1.0 if _reads_parameter(n) else 0.0 for n in nodes]
    ends = [0, *(e.position for e in places), len(nodes)]
    layers = sum(any(weights[a:b]) for a, b in pairwise(ends))
    if layers < stages:
        raise PlanError(
            f"{stages} stages for a model of {layers} layer{'s' if layers != 1 else ''} with parameters",
            rule=f"every stage has a layer of its own: {stages} > {layers}", fix=f"pp x virtual = {layers} or less",
        )  # fmt: skip
    price = [costs[n] if costs and n in costs else cost_of(n) for n in nodes]
    sums = [0.0]
    owns = [0.0]
    for p, w in zip(price, weights, strict=True):
        sums.append(sums[-1] + p)
        owns.append(owns[-1] + w)
    crossing = _crossing(graph, nodes)
    return [places[i].key for i in _best([e.position for e in places], stages, sums, owns, crossing, len(nodes))]


def _best(
    at: Sequence[int], stages: int, sums: Sequence[float], owns: Sequence[float], crossing: Sequence[float], end: int
) -> list[int]:
    """Indices into `at`: by dynamic programming over (stages so far, where the last one begins)."""
    k = len(at)
    starts = [0, *at]
    best = {0: (0.0, 0.0, ())}
    table: dict[int, tuple[float, float, tuple[int, ...]]] = dict(best)
    for _ in range(stages - 1):
        new: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for i, (worst, sent, chosen) in table.items():
            for j in range(i + 1, k + 1):
                a, b = starts[i], starts[j]
                if owns[b] == owns[a]:
                    continue
                send = FLOPS_PER_BYTE * crossing[b]
                slower = max(worst, sums[b] - sums[a] + send)
                found = (slower, sent + send, (*chosen, j - 1))
                if j not in new or found[:2] < new[j][:2]:
                    new[j] = found
        table = new
    finals = [
        (max(worst, sums[end] - sums[starts[i]]), sent, chosen)
        for i, (worst, sent, chosen) in table.items()
        if owns[end] > owns[starts[i]]
    ]
    return list(min(finals)[2])


def positions(graph: Graph, keys: Sequence[Key], holders: set[str]) -> list[int]:
    """Where boundaries lie in a graph, as origins of its operators."""
    places = {e.key: e.position for e in entries(graph, holders)}
    for name, call in keys:
        if (name, call) not in places:
            raise PlanError(f"a stage begins at call {call} of {name}, which does not run for this batch")
    return [places[key] for key in keys]


def cost_of(node: Node) -> float:
    """Operations of a node, about: products by their sizes, anything else by its numbers."""
    val = node.meta.get("val")
    if isinstance(val, list | tuple):
        val = val[0] if val and isinstance(val[0], torch.Tensor) else None
    if not isinstance(val, torch.Tensor):
        return 0.0
    w = weighing(node)
    if w is not None and w.summed is not None and w.given is not None:
        weight: torch.Tensor = w.weight.meta["val"]
        return 2.0 * val.numel() * weight.numel() / weight.shape[w.given]
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
    total, found = 0.0, []
    for c in changes:
        total += c
        found.append(total)
    return found
