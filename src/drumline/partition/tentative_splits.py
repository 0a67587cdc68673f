"""Tentative splits of weights: how their features may be cut, and whether the splits reach the next matmul without a
gather.

A fused projection gives queries, keys and values in one row: each of them is a segment, and is cut by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch.fx import Node

from .capture import CapturedGraph
from .sharding import redistribution
from .sharding.halo_exchange import rebalance, window, windows
from .sharding.layout import ShardedValue, Split, even_bounds, even_split
from .sharding.redistribution import Axis
from .sharding_pass import ShardingPass
from .weight_matmuls import WeightMatmul, is_parameter, is_transposed_parameter

aten = torch.ops.aten
Sizes = tuple[int, ...]
"""Sizes of the segments of a dim."""
REACH = 12
"""Nodes after a matmul to examine."""


def segmentations(columns: Sequence[WeightMatmul], n: int) -> Iterator[int | Sizes]:
    """Ways to cut the columns' outputs for n ranks: numbers of equal segments, or sizes of unequal ones."""
    yield 1
    counts: set[int] = set()
    for c in columns:
        size = c.weight.meta["val"].shape[c.feature_dim or 0]
        for node in _after(c.node):
            val = node.meta.get("val")
            if isinstance(val, list | tuple):
                counts.add(len(val))
            elif isinstance(val, torch.Tensor):
                counts |= {d for d in val.shape if 1 < d <= 8}
        counts = {k for k in counts if size % (k * n) == 0}
    yield from sorted(counts - {1})
    if len(columns) == 1:
        yield from _unequal(columns[0], n)


def split_for(size: int, segments: int | Sizes, n: int) -> Split | None:
    """The split of a dim of that size into such segments for n ranks; None where it is not even."""
    if isinstance(segments, int):
        return None if size % (segments * n) else even_split(0, size, n, segments)
    return Split(0, tuple(even_bounds(s, n) for s in segments)) if sum(segments) == size else None


def _unequal(column: WeightMatmul, n: int) -> Iterator[Sizes]:
    """Unequal segments: a fused projection of many queries and few keys is sliced, or split by sizes."""
    size = column.weight.meta["val"].shape[column.feature_dim or 0]
    ends = {0, size}
    for user in column.node.users:
        val = user.meta.get("val")
        if isinstance(val, list | tuple):
            lengths = [v.shape[-1] for v in val if isinstance(v, torch.Tensor)]
            ends |= set(accumulate(lengths)) if sum(lengths) == size else set()
        elif user.target is aten.slice.Tensor and user.args[1:2] in ((-1,), (column.node.meta["val"].dim() - 1,)):
            start, stop, *_ = slice(*user.args[2:4]).indices(size)
            ends |= {start, stop}
    sizes = tuple(b - a for a, b in pairwise(sorted(ends)))
    if len(set(sizes)) > 1 and all(s % n == 0 for s in sizes):
        yield sizes


def _after(node: Node) -> Iterator[Node]:
    """The node and its direct and indirect readers, nearest first."""
    todo = [node]
    for _ in range(REACH):
        if not todo:
            return
        at = todo.pop(0)
        yield at
        todo += list(at.users)


COMMUNICATION = (redistribution.gather, redistribution.gather_into_split_work, window, windows, rebalance)
"""Communication of the columns' outputs: with any of it, a group is not worth it."""


class SplitProbe:
    """Propagates splits from weights to the matmul that sums over the split features."""

    def __init__(self, captured: CapturedGraph, axis: Axis, seeds: dict[str, Split]) -> None:
        self._pass = ShardingPass(captured.graph, axis, captured.mode, seeds)
        self.taken: dict[str, Split] = {}
        """Parameters in between that must be split too: a norm's weight between two convolutions."""

    def to(self, between: Iterable[Node], row: WeightMatmul) -> Split | None:
        """The split of the row's input, or None if something in between needs a whole tensor."""
        for node in between:
            self._provide(node)
            value = self._converted(node)
            first = _first(value)
            if self._pass.gathered or (first is not None and first.layout is None):
                return None
            self._pass.values[node] = value
        arrived = self._pass.values.get(row.input)
        self.taken = {str(n.target): split for n, split in self._pass.taken_parts() if is_parameter(n)}
        if not isinstance(arrived, ShardedValue) or arrived.layout is None or arrived.layout.dim != row.input_dim:
            return None
        # a value that was communicated, or parts of unequal size, cannot form a column-row pair
        moved = any(n.target in COMMUNICATION for n in self._pass.new.nodes)
        uneven = len({arrived.split.length(r) for r in range(self._pass.axis.size)}) > 1
        return None if moved or uneven else arrived.split

    def _converted(self, node: Node) -> object:
        self._pass.current = node
        return self._pass.convert(node)

    def _provide(self, node: Node) -> None:
        """Provide arguments from outside as whole values."""
        values = self._pass.values
        for a in node.all_input_nodes:
            if a in values:
                continue
            if a.op == "placeholder":
                values[a] = self._converted(a)
            elif is_transposed_parameter(a):  # a weight as its matmul reads it
                self._provide(a)
                values[a] = self._converted(a)
            else:
                values[a] = _outside(self._pass, a)


def _outside(ctx: ShardingPass, node: Node) -> object:
    val = node.meta.get("val")
    new = ctx.new.placeholder(f"outside_{node.name}")
    new.meta["val"] = val.detach() if isinstance(val, torch.Tensor) else val
    if isinstance(val, torch.Tensor):
        return ShardedValue(new, None, val.shape)
    if isinstance(val, list | tuple):
        return [ShardedValue(ctx.call(operator.getitem, new, i), None, v.shape) for i, v in enumerate(val)]
    return new


def _first(made: object) -> ShardedValue | None:
    if isinstance(made, ShardedValue):
        return made
    if isinstance(made, list | tuple) and made and isinstance(made[0], ShardedValue):
        return made[0]
    return None
