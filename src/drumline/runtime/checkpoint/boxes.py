"""Parts of a tensor along one dim, as a plan that splits the model itself leaves them on a rank.

The numbers of such a box lie in many short runs of the flattened tensor (columns of a matrix: one run a row). Files are
read and written in long runs, a few megabytes at a time; the short ones are cut out of them, or put into them, in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from pydantic import ConfigDict

from ..strategies.pieces import Cut, Piece
from .shard import CHUNK

_LONG = 2**18
"""Bytes of a run that is worth an operation of its own."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor that has these ranges of one dim, one behind the other."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """First, and one past the last; none is empty, and no two of them touch."""

    def __str__(self) -> str:
        return f"{', '.join(f'{a}..{b}' for a, b in self.ranges)} of dim {self.dim}"

    @property
    def length(self) -> int:
        """How much of the dim it has."""
        return sum(stop - start for start, stop in self.ranges)

    def row(self, shape: tuple[int, ...]) -> int:
        """Numbers of the tensor for one place in all the dims before `dim`."""
        return math.prod(shape[self.dim :])

    def mine(self, shape: tuple[int, ...]) -> int:
        """Numbers of a row that are in the box."""
        return self.length * math.prod(shape[self.dim + 1 :])

    def numel(self, shape: tuple[int, ...]) -> int:
        """Numbers in it."""
        return math.prod(shape[: self.dim]) * self.mine(shape)

    def place(self, shape: tuple[int, ...], number: int) -> int:
        """Where number `number` of the flattened box lies in the flattened tensor."""
        there, *_ = next(self.runs(shape, number, number + 1))
        return there

    def runs(self, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Numbers start .. stop of the flattened box as runs of the tensor: (in the tensor, in the box, how many)."""
        row, mine, inner = self.row(shape), self.mine(shape), math.prod(shape[self.dim + 1 :])
        for outer in range(start // mine, -(-stop // mine)):
            local = outer * mine
            for a, b in self.ranges:
                first, last = max(start, local), min(stop, local + (b - a) * inner)
                if first < last:
                    yield outer * row + a * inner + first - local, first, last - first
                local += (b - a) * inner

    def within(self, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The runs that lie in numbers start .. stop of the flattened tensor, in the same form."""
        row, mine, inner = self.row(shape), self.mine(shape), math.prod(shape[self.dim + 1 :])
        for outer in range(start // row, -(-stop // row)):
            local = outer * mine
            for a, b in self.ranges:
                begin = outer * row + a * inner
                first, last = max(start, begin), min(stop, begin + (b - a) * inner)
                if first < last:
                    yield first, local + first - begin, last - first
                local += (b - a) * inner

    def take(self, shape: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
        """The box's numbers of some whole rows, flat."""
        whole = rows.view(-1, shape[self.dim], math.prod(shape[self.dim + 1 :]))
        return torch.cat([whole[:, a:b] for a, b in self.ranges], 1).reshape(-1)

    def put(self, shape: tuple[int, ...], rows: torch.Tensor, part: torch.Tensor) -> None:
        """The other way round."""
        inner = math.prod(shape[self.dim + 1 :])
        whole, mine = rows.view(-1, shape[self.dim], inner), part.view(-1, self.length, inner)
        place = 0
        for a, b in self.ranges:
            whole[:, a:b] = mine[:, place : place + b - a]
            place += b - a

    def in_long_runs(self, shape: tuple[int, ...], itemsize: int) -> bool:
        """Whether its runs are read one by one, and not cut out of whole rows."""
        inner = math.prod(shape[self.dim + 1 :]) * itemsize
        return min(b - a for a, b in self.ranges) * inner >= _LONG or self.row(shape) * itemsize > CHUNK

    def windows(self, shape: tuple[int, ...], first: int, last: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Rows first .. last, a few megabytes at a time: (the first row, how many)."""
        step = max(1, CHUNK // (self.row(shape) * itemsize))
        for start in range(first, last, step):
            yield start, min(step, last - start)


def place_of(piece: Piece) -> tuple[int, Box | None]:
    """Where a piece's numbers begin, and in which box they are counted; None: in the whole parameter.

    Parts that are one run of the whole on every rank (rows of a matrix) are runs, as sharded parameters are.
    """
    if piece.cut is None:
        return piece.start, None
    cut, shape = piece.cut, piece.shape
    ranks = len(cut.split.cuts[0]) - 1
    boxes = [_box(Cut(cut.split, rank)) for rank in range(ranks)]
    mine = boxes[cut.index]
    if math.prod(shape[: mine.dim]) == 1 and all(len(box.ranges) <= 1 for box in boxes):
        first = mine.ranges[0][0] if mine.ranges else 0
        return first * math.prod(shape[mine.dim + 1 :]) + piece.start, None
    return piece.start, mine


def _box(cut: Cut) -> Box:
    """The ranges of a cut, with those that touch put together."""
    ranges: list[tuple[int, int]] = []
    for run in cut.split.ranges(cut.index):
        if ranges and ranges[-1][1] == run.start and run:
            ranges[-1] = ranges[-1][0], run.stop
        elif run:
            ranges.append((run.start, run.stop))
    return Box(cut.split.dim, tuple(ranges))


Fill = Callable[[int, torch.Tensor], None]
"""(first number, where they go): the next numbers of a flattened tensor, as many as there is room for."""


@torch.no_grad()
def fill_box(fill: Fill, shape: tuple[int, ...], box: Box, start: int, out: torch.Tensor) -> None:
    """Numbers `start` and on of a flattened box, as many as `out` has, out of a tensor that is read in runs."""
    if not out.numel():
        return
    flat = out.detach().view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
    stop = start + out.numel()
    if box.in_long_runs(shape, out.element_size()):
        for there, here, n in box.runs(shape, start, stop):
            fill(there, flat[here - start : here - start + n])
    else:
        row, mine = box.row(shape), box.mine(shape)
        for first, count in box.windows(shape, start // mine, -(-stop // mine), out.element_size()):
            rows = torch.empty(count * row, dtype=out.dtype)
            fill(first * row, rows)
            low, high = max(start, first * mine), min(stop, (first + count) * mine)
            flat[low - start : high - start].copy_(box.take(shape, rows)[low - first * mine : high - first * mine])
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))
