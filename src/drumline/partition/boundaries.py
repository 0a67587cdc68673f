"""Where the stages of a pipeline begin: at modules with parameters, so that the slowest stage is as fast as can be.

What a stage costs is counted from its operators, or measured (see `Prices`); the search for the boundaries is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.fx import Graph, Node

from ..core.errors import PlanError, nearest
from .stages import cut, operators
from .weights import weighing

FLOPS_PER_BYTE = {"cpu": 80.0, "cuda": 1000.0}
"""What a byte between two stages costs, in operations, by the kind of device, where nobody knows the machine.
docs/pipelines.md has what machines have, and how little depends on it."""

FORWARD_AND_BACKWARD = 3.0
"""Operations of both, where those of the forward are counted."""
SLACK = 1.05
"""How much slower than it could be the slowest stage may be, where fewer bytes travel for it."""

Key = tuple[str, int]
"""A module, and which of its calls."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A place where a stage may begin."""

    key: Key
    position: int
    """Among `operators(graph)`."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What the boundaries are chosen by, in any one unit: operations, or seconds."""

    segments: tuple[float, ...] = ()
    """Of the operators up to the first entry, from there to the second, and so on; none: they are counted."""
    per_byte: float = FLOPS_PER_BYTE["cpu"]
    """Of what goes from a stage to a later one."""


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
                rule="split names modules that run, each of which begins a stage",
                fix=nearest(name, places),
            )
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


def balanced(graph: Graph, stages: int, holders: set[str], prices: Prices | None = None) -> list[Key]:
    """Boundaries such that the slowest stage is about as fast as can be; every stage has a parameter of its own."""
    prices, places = prices or Prices(), entries(graph, holders)
    nodes = operators(graph)
    weights = [1.0 if _reads_parameter(n) else 0.0 for n in nodes]
    ends = [0, *(e.position for e in places), len(nodes)]
    layers = sum(any(weights[a:b]) for a, b in pairwise(ends))
    if layers < stages:
        raise PlanError(
            f"{stages} stages for a model of {layers} layer{'s' if layers != 1 else ''} with parameters",
            rule=f"every stage has a layer of its own: {stages} > {layers}",
            fix=f"pp x virtual = {layers} or less",
        )
    price = _by_operator(prices, ends) if prices.segments else [FORWARD_AND_BACKWARD * cost_of(n) for n in nodes]
    sums, owns = ([0.0, *accumulate(numbers)] for numbers in (price, weights))
    sends = [prices.per_byte * size for size in _crossing(graph, nodes)]

    def chosen(among: Sequence[Entry]) -> list[Entry]:
        return [among[i] for i in _best([e.position for e in among], stages, sums, owns, sends, len(nodes))]

    found = chosen(places)
    if not _can_be_cut(graph, [e.position for e in found]):
        allowed = set(cuttable(graph, holders))
        found = chosen([e for e in places if e.position in allowed]) or found  # what cannot be is refused by `cut`
    return [e.key for e in found]


def cuttable(graph: Graph, holders: set[str]) -> list[int]:
    """The entries at which a stage can begin: no number and no write in place goes across."""
    at = [e.position for e in entries(graph, holders)]
    return at if _can_be_cut(graph, at) else [b for b in at if _can_be_cut(graph, [b])]


def _can_be_cut(graph: Graph, at: Sequence[int]) -> bool:
    try:
        cut(graph, at)
    except PlanError:
        return False
    return True


def _by_operator(prices: Prices, ends: Sequence[int]) -> list[float]:
    """Each segment's price at its first operator: stages begin nowhere else."""
    found = [0.0] * ends[-1]
    for start, price in zip(ends, prices.segments, strict=False):  # `ends` has the end of the last one too
        found[start] = price
    return found


def _best(
    at: Sequence[int], stages: int, sums: Sequence[float], owns: Sequence[float], sends: Sequence[float], end: int
) -> list[int]:
    """Indices into `at`. First the time of the slowest stage, then the fewest bytes that keep about that time.

    Messages travel behind computation: one costs time where it takes longer than the stage that sends it computes.
    """
    starts = [0, *at, end]
    sent = [sends[b] if b < end else 0.0 for b in starts]

    def price(i: int, j: int) -> float:
        return max(sums[starts[j]] - sums[starts[i]], sent[j])

    allowed = [[j for j in range(i + 1, len(starts)) if owns[starts[j]] > owns[starts[i]]] for i in range(len(starts))]
    fastest = _way(stages, allowed, lambda so_far, i, j: (max(so_far[0], price(i, j)),))
    if fastest is None:
        return []
    limit = SLACK * fastest[0][0]

    def fewest(so_far: tuple[float, ...], i: int, j: int) -> tuple[float, ...] | None:
        slowest = max(so_far[1], price(i, j))
        return (so_far[0] + sent[j], slowest) if slowest <= limit else None

    found = _way(stages, allowed, fewest)
    assert found is not None, "the way that is fastest is within the limit"
    return [i - 1 for i in found[1]]


Sums = tuple[float, ...]


def _way(
    stages: int, allowed: Sequence[Sequence[int]], add: Callable[[Sums, int, int], Sums | None]
) -> tuple[Sums, tuple[int, ...]] | None:
    """The least sums of so many stages from the first start to the last, and where they begin: by dynamic programming.

    `allowed[i]` is where a stage that begins at i may end; `add` gives the sums with one more stage, or None.
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
