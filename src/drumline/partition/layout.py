"""How a tensor lies on the ranks of one mesh axis: whole on each, or split along one dim.

A dim is a concatenation of segments, and each segment is cut at its own bounds: 16 rows in two halves are
`cuts=((0, 8, 16),)`; a fused projection of queries, keys and values, each split by heads, is `cuts=((0, 8, 16),) * 3`;
the flattened (samples, tokens) of a batch whose tokens are split has a segment for each sample. Rank r holds
[bounds[r], bounds[r + 1]) of every segment, one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

Bounds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Each rank holds a part along `dim`; its gradient is the same part of the gradient."""

    dim: int
    cuts: tuple[Bounds, ...]

    @property
    def size(self) -> int:
        """The whole length of the dim."""
        return sum(bounds[-1] for bounds in self.cuts)

    @property
    def bounds(self) -> Bounds:
        """Of a dim that is one segment."""
        assert len(self.cuts) == 1, f"{self} has several segments"
        return self.cuts[0]

    def length(self, rank: int) -> int:
        """How much of the dim a rank holds."""
        return sum(bounds[rank + 1] - bounds[rank] for bounds in self.cuts)

    def ranges(self, rank: int) -> Iterator[range]:
        """What a rank holds, in numbers of the whole dim, in its own order."""
        for start, bounds in zip(accumulate((b[-1] for b in self.cuts), initial=0), self.cuts, strict=False):
            yield range(start + bounds[rank], start + bounds[rank + 1])

    def at(self, dim: int) -> Split:
        """The same cuts along another dim."""
        return Split(dim, self.cuts)

    def __str__(self) -> str:
        cuts = f"{self.cuts[0]}" if len(set(self.cuts)) == 1 else f"{self.cuts}"
        return f"dim {self.dim} cut at {cuts}" + (f" in {len(self.cuts)} segments" if len(self.cuts) > 1 else "")


Layout = Split | None
"""None: every rank has the whole, and on every rank its gradient is the whole gradient."""


def even(size: int, n: int) -> Bounds:
    """0 .. size in n parts whose lengths differ by at most one, the longer ones first."""
    return tuple(i * (size // n) + min(i, size % n) for i in range(n + 1))


def evenly(dim: int, size: int, n: int, segments: int = 1) -> Split:
    """A dim of `segments` equal segments, each in n parts."""
    return Split(dim, (even(size // segments, n),) * segments)


def first_of(size: int, n: int) -> Bounds:
    """All of it with the first rank."""
    return (0, *([size] * n))


def last_of(size: int, n: int) -> Bounds:
    """All of it with the last rank."""
    return (*([0] * n), size)


def merged(cuts: tuple[Bounds, ...]) -> tuple[Bounds, ...]:
    """Neighbouring segments become one where every rank's parts of both lie together in the whole."""
    made: list[Bounds] = []
    for bounds in cuts:
        if made and _follows(made[-1], bounds):
            made[-1] = tuple(a + b for a, b in zip(made[-1], bounds, strict=True))
        else:
            made.append(bounds)
    return tuple(made)


def _follows(one: Bounds, other: Bounds) -> bool:
    """Whether a rank ends the first segment, and nobody before it has anything of the second."""
    return any(one[r + 1] == one[-1] and other[r] == 0 for r in range(len(one) - 1))


def reshaped(split: Split, before: Sequence[int], after: Sequence[int]) -> Split | None:
    """The split of a tensor after `view`: None where no dim of the new shape carries it."""
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
    """The smallest runs of dims of both shapes that hold the same numbers."""
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
        # dims of one element belong to the run before them
        while i < len(before) and before[i] == 1 and not (j < len(after) and after[j] == 1):
            i += 1
        while j < len(after) and after[j] == 1 and not (i < len(before) and before[i] == 1):
            j += 1
        yield start, i, new_start, j


def _unflatten(flat: tuple[Bounds, ...], shape: tuple[int, ...], start: int, stop: int) -> Split | None:
    """The dim of shape[start:stop] along which segments of the flattened dims lie, if there is one."""
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
