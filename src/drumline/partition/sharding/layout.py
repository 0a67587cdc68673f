"""Layout of a tensor on the ranks of one mesh axis: whole on each, or split along one dim.

A dim is a concatenation of segments, each cut at its own bounds: 16 rows in two halves are `cuts=((0, 8, 16),)`; a
fused projection of queries, keys and values, each split by heads, is `cuts=((0, 8, 16),) * 3`; the flattened (samples,
tokens) of a batch with split tokens has a segment per sample. Rank r has [bounds[r], bounds[r + 1]) of every segment,
concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

Bounds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Each rank has a part along `dim`, and the same part of the gradient."""

    dim: int
    cuts: tuple[Bounds, ...]

    @property
    def size(self) -> int:
        """The whole length of the dim."""
        return sum(bounds[-1] for bounds in self.cuts)

    @property
    def bounds(self) -> Bounds:
        """The bounds of a dim with one segment."""
        assert len(self.cuts) == 1, f"{self} has several segments"
        return self.cuts[0]

    def length(self, rank: int) -> int:
        """Length of a rank's part."""
        return sum(bounds[rank + 1] - bounds[rank] for bounds in self.cuts)

    def ranges(self, rank: int) -> Iterator[range]:
        """Ranges of the whole dim that a rank has, in its own order."""
        for start, bounds in zip(accumulate((b[-1] for b in self.cuts), initial=0), self.cuts, strict=False):
            yield range(start + bounds[rank], start + bounds[rank + 1])

    def along(self, dim: int) -> Split:
        """The same cuts along another dim."""
        return Split(dim, self.cuts)

    def __str__(self) -> str:
        cuts = f"{self.cuts[0]}" if len(set(self.cuts)) == 1 else f"{self.cuts}"
        return f"dim {self.dim} cut at {cuts}" + (f" in {len(self.cuts)} segments" if len(self.cuts) > 1 else "")


Layout = Split | None
"""None: every rank has the whole tensor and the whole gradient."""


def even_bounds(size: int, n: int) -> Bounds:
    """Bounds of n parts whose lengths differ by at most one, longer ones first."""
    return tuple(i * (size // n) + min(i, size % n) for i in range(n + 1))


def even_split(dim: int, size: int, n: int, segments: int = 1) -> Split:
    """A dim of `segments` equal segments, each in n parts."""
    return Split(dim, (even_bounds(size // segments, n),) * segments)


def all_on_first(size: int, n: int) -> Bounds:
    """Bounds that give everything to the first rank."""
    return (0, *([size] * n))


def all_on_last(size: int, n: int) -> Bounds:
    """Bounds that give everything to the last rank."""
    return (*([0] * n), size)


def merge_segments(cuts: tuple[Bounds, ...]) -> tuple[Bounds, ...]:
    """Merge neighbouring segments where every rank's parts of both are adjacent in the whole."""
    result: list[Bounds] = []
    for bounds in cuts:
        if result and _continues(result[-1], bounds):
            result[-1] = tuple(a + b for a, b in zip(result[-1], bounds, strict=True))
        else:
            result.append(bounds)
    return tuple(result)


def _continues(one: Bounds, other: Bounds) -> bool:
    """Whether some rank ends the first segment, and no rank before it has any of the second."""
    return any(one[r + 1] == one[-1] and other[r] == 0 for r in range(len(one) - 1))


def reshape_split(split: Split, before: Sequence[int], after: Sequence[int]) -> Split | None:
    """The split of a tensor after `view`, or None if no dim of the new shape carries it."""
    if math.prod(before) == 0:
        return None
    for start, stop, new_start, new_stop in _groups(before, after):
        if start <= split.dim < stop:
            outer = math.prod(before[start : split.dim])
            inner = math.prod(before[split.dim + 1 : stop])
            flat = tuple(tuple(b * inner for b in bounds) for bounds in split.cuts) * outer
            return _unflatten(flat, tuple(after), new_start, new_stop)
    return None


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """The smallest runs of dims of both shapes with equal numbers of elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        a, b, start, new_start = 1, 1, i, j
        while True:
            if i < len(before) and (a <= b or j >= len(after)):
                a *= before[i]
                i += 1
            elif j < len(after):
                b *= after[j]
                j += 1
            if a == b and i > start and j > new_start:
                break
            if i >= len(before) and j >= len(after):
                break
        # dims of size 1 belong to the run before them
        while i < len(before) and before[i] == 1 and not (j < len(after) and after[j] == 1):
            i += 1
        while j < len(after) and after[j] == 1 and not (i < len(before) and before[i] == 1):
            j += 1
        yield start, i, new_start, j


def _unflatten(flat: tuple[Bounds, ...], shape: tuple[int, ...], start: int, stop: int) -> Split | None:
    """The split of shape[start:stop] that corresponds to segments of the flattened dims, or None."""
    for dim in range(start, stop):
        outer, inner = math.prod(shape[start:dim]), math.prod(shape[dim + 1 : stop])
        if shape[dim] == 1 or len(flat) % outer or any(b % inner for bounds in flat for b in bounds):
            continue
        each = len(flat) // outer
        cuts = tuple(tuple(b // inner for b in bounds) for bounds in flat[:each])
        same = all(flat[k * each : (k + 1) * each] == flat[:each] for k in range(outer))
        if same and sum(bounds[-1] for bounds in cuts) == shape[dim]:
            return Split(dim, cuts)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class ShardedValue:
    """A tensor of the old graph, as this rank has it in the new one."""

    node: Node
    """Its node in the new graph, whose meta["val"] has the local shape."""
    layout: Layout
    whole: torch.Size

    @property
    def split(self) -> Split:
        """Its split; it must have one."""
        assert self.layout is not None
        return self.layout

    @property
    def fake(self) -> torch.Tensor:
        """A fake tensor of its local shape and type."""
        val = self.node.meta["val"]
        assert isinstance(val, torch.Tensor)
        return val

    @property
    def dim(self) -> int:
        """Number of dims."""
        return len(self.whole)


def fill_arguments(args: Any, values: Mapping[Node, Any]) -> Any:
    """A node's arguments, with each node replaced by its value."""
    slot: Any = lambda n: _Slot(values[n])  # noqa: E731  # fx types it too narrowly
    return _open(map_arg(args, slot))


def map_values(args: Any, do: Callable[[ShardedValue], Any]) -> Any:
    """Arguments, with a function applied to every value among them."""
    if isinstance(args, ShardedValue):
        return do(args)
    if isinstance(args, tuple | list):
        return tuple(map_values(a, do) for a in args) if isinstance(args, tuple) else [map_values(a, do) for a in args]
    if isinstance(args, dict):
        return {k: map_values(a, do) for k, a in args.items()}
    return args


def nodes_of(args: Any) -> Any:
    """Arguments, with values replaced by their nodes."""
    return map_values(args, lambda v: v.node)


def values_in(args: Any) -> list[ShardedValue]:
    """All values among arguments."""
    values: list[ShardedValue] = []
    map_values(args, values.append)
    return values


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Keeps fx from traversing a ShardedValue."""

    value: Any


def _open(args: Any) -> Any:
    if isinstance(args, _Slot):
        return args.value
    if isinstance(args, tuple | list):
        return type(args)(_open(a) for a in args) if type(args) in (tuple, list) else tuple(_open(a) for a in args)
    if isinstance(args, dict):
        return {k: _open(a) for k, a in args.items()}
    return args
