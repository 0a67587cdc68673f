"""Parts of a tensor along one dim, as a rank has them under a plan that splits the model.

The elements of such a box are many short runs of the flattened tensor (columns of a matrix: one run per row). Files are
read and written in long runs, a few megabytes at a time; the short ones are sliced out of them, or inserted, in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from pydantic import ConfigDict

from ..state.pieces import ParameterSlice, Piece
from .tensor_files import CHUNK

_LONG = 2**18
"""Bytes from which a run is worth its own read."""


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor within some ranges of one dim, concatenated."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """(start, stop) of each range; none is empty, and none are adjacent."""

    def __str__(self) -> str:
        return f"{', '.join(f'{a}..{b}' for a, b in self.ranges)} of dim {self.dim}"

    @property
    def length(self) -> int:
        """Length along the dim."""
        return sum(stop - start for start, stop in self.ranges)

    def row(self, shape: tuple[int, ...]) -> int:
        """Elements of the tensor per index of the dims before `dim`."""
        return math.prod(shape[self.dim :])

    def row_in_box(self, shape: tuple[int, ...]) -> int:
        """Elements of a row that are in the box."""
        return self.length * math.prod(shape[self.dim + 1 :])

    def numel(self, shape: tuple[int, ...]) -> int:
        """Number of elements."""
        return math.prod(shape[: self.dim]) * self.row_in_box(shape)

    def tensor_index(self, shape: tuple[int, ...], index: int) -> int:
        """The index in the flattened tensor of an index in the flattened box."""
        in_tensor, *_ = next(self.runs(shape, index, index + 1))
        return in_tensor

    def runs(self, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements start .. stop of the flattened box as runs: (index in the tensor, index in the box, length)."""
        row, in_box, inner = self.row(shape), self.row_in_box(shape), math.prod(shape[self.dim + 1 :])
        for outer in range(start // in_box, -(-stop // in_box)):
            local = outer * in_box
            for a, b in self.ranges:
                first, last = max(start, local), min(stop, local + (b - a) * inner)
                if first < last:
                    yield outer * row + a * inner + first - local, first, last - first
                local += (b - a) * inner

    def within(self, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The runs within elements start .. stop of the flattened tensor, in the same form."""
        row, in_box, inner = self.row(shape), self.row_in_box(shape), math.prod(shape[self.dim + 1 :])
        for outer in range(start // row, -(-stop // row)):
            local = outer * in_box
            for a, b in self.ranges:
                begin = outer * row + a * inner
                first, last = max(start, begin), min(stop, begin + (b - a) * inner)
                if first < last:
                    yield first, local + first - begin, last - first
                local += (b - a) * inner

    def take(self, shape: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
        """The box's elements of some whole rows, flattened."""
        whole = rows.view(-1, shape[self.dim], math.prod(shape[self.dim + 1 :]))
        return torch.cat([whole[:, a:b] for a, b in self.ranges], 1).reshape(-1)

    def put(self, shape: tuple[int, ...], rows: torch.Tensor, part: torch.Tensor) -> None:
        """Write the box's elements into some whole rows."""
        inner = math.prod(shape[self.dim + 1 :])
        whole, boxed = rows.view(-1, shape[self.dim], inner), part.view(-1, self.length, inner)
        offset = 0
        for a, b in self.ranges:
            whole[:, a:b] = boxed[:, offset : offset + b - a]
            offset += b - a

    def in_long_runs(self, shape: tuple[int, ...], itemsize: int) -> bool:
        """Whether its runs are read one by one instead of sliced out of whole rows."""
        inner = math.prod(shape[self.dim + 1 :]) * itemsize
        return min(b - a for a, b in self.ranges) * inner >= _LONG or self.row(shape) * itemsize > CHUNK

    def windows(self, shape: tuple[int, ...], first: int, last: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Rows first .. last, a few megabytes at a time: (first row, count)."""
        step = max(1, CHUNK // (self.row(shape) * itemsize))
        for start in range(first, last, step):
            yield start, min(step, last - start)


def location_of(piece: Piece) -> tuple[int, Box | None]:
    """The start of a piece, and the box it is counted in; None: in the whole parameter.

    Parts that are one run of the parameter on every rank (rows of a matrix) need no box, like sharded parameters.
    """
    if piece.slice is None:
        return piece.start, None
    cut, shape = piece.slice, piece.shape
    ranks = len(cut.split.cuts[0]) - 1
    boxes = [_box(ParameterSlice(cut.split, rank)) for rank in range(ranks)]
    mine = boxes[cut.index]
    if math.prod(shape[: mine.dim]) == 1 and all(len(box.ranges) <= 1 for box in boxes):
        first = mine.ranges[0][0] if mine.ranges else 0
        return first * math.prod(shape[mine.dim + 1 :]) + piece.start, None
    return piece.start, mine


def _box(cut: ParameterSlice) -> Box:
    """The ranges of a cut, with adjacent ones merged."""
    ranges: list[tuple[int, int]] = []
    for run in cut.split.ranges(cut.index):
        if ranges and ranges[-1][1] == run.start and run:
            ranges[-1] = ranges[-1][0], run.stop
        elif run:
            ranges.append((run.start, run.stop))
    return Box(cut.split.dim, tuple(ranges))


Fill = Callable[[int, torch.Tensor], None]
"""(start, out): fill `out` with the elements of a flattened tensor from `start` on."""


@torch.no_grad()
def fill_box(fill: Fill, shape: tuple[int, ...], box: Box, start: int, out: torch.Tensor) -> None:
    """Fill `out` with the elements of a flattened box from `start` on, from a tensor that is read in runs."""
    if not out.numel():
        return
    flat = out.detach().view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
    stop = start + out.numel()
    if box.in_long_runs(shape, out.element_size()):
        for in_tensor, index, n in box.runs(shape, start, stop):
            fill(in_tensor, flat[index - start : index - start + n])
    else:
        row, in_box = box.row(shape), box.row_in_box(shape)
        for first, count in box.windows(shape, start // in_box, -(-stop // in_box), out.element_size()):
            rows = torch.empty(count * row, dtype=out.dtype)
            fill(first * row, rows)
            low, high = max(start, first * in_box), min(stop, (first + count) * in_box)
            flat[low - start : high - start].copy_(box.take(shape, rows)[low - first * in_box : high - first * in_box])
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))
