"""Rows of operators along a split dim: which output rows a rank owns, which input rows it needs, and operations on
rows.

A rank owns the outputs whose centre is in its input rows, so that little but the halo is sent, and a skip connection
meets a convolution at the same bounds. If there are enough outputs, every rank has some. The operations work along one
dim and leave the others alone, so a graph sharded along the rows of an image can be sharded along its columns too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from ..sharding.halo_exchange import Span
from ..sharding.layout import Bounds


@dataclass(frozen=True, slots=True)
class SlidePlan:
    """Input rows and output bounds of an operator along a split dim."""

    wanted: tuple[Span, ...]
    """The input rows that each rank needs."""
    bounds: Bounds
    """Bounds of the output."""

    def out(self, rank: int) -> Span:
        """The output rows that a rank owns."""
        return self.bounds[rank], self.bounds[rank + 1]


@lru_cache(maxsize=4096)
def plan_slide(
    bounds: Bounds, kernel: int, stride: int, before: int, after: int, dilation: int = 1, ceil: bool = False
) -> SlidePlan:
    """Plan a kernel that slides over rows, with `before` and `after` rows of padding: convolution and pooling."""
    size, reach = bounds[-1], (kernel - 1) * dilation
    steps = size + before + after - reach - 1
    count = (-(-steps // stride) if ceil else steps // stride) + 1
    if ceil and (count - 1) * stride >= size + before:
        count -= 1  # a kernel must begin inside the rows or the padding before them
    out = feasible_bounds((ceil_div(2 * (b + before) - reach, 2 * stride) for b in bounds), count)
    return SlidePlan(
        tuple((a * stride - before, (b - 1) * stride - before + reach + 1) if a < b else (0, 0) for a, b in spans(out)),
        out,
    )


@lru_cache(maxsize=4096)
def plan_transposed_slide(
    bounds: Bounds, kernel: int, stride: int, before: int, count: int, dilation: int = 1
) -> SlidePlan:
    """Plan a transposed kernel: row i contributes to rows i * stride - before + k * dilation of `count` outputs."""
    size, reach = bounds[-1], (kernel - 1) * dilation
    out = feasible_bounds((ceil_div(2 * (b * stride - before) + reach + 1 - stride, 2) for b in bounds), count)

    def needed(a: int, b: int) -> Span:
        first, last = max(0, ceil_div(a + before - reach, stride)), min(size, (b - 1 + before) // stride + 1)
        return (first, last) if a < b and first < last else (0, 0)

    return SlidePlan(tuple(needed(a, b) for a, b in spans(out)), out)


def feasible_bounds(inner: Iterable[int], size: int) -> Bounds:
    """The nearest feasible bounds: from 0 to size, ascending, and no rank without rows if there are enough."""
    targets = [min(max(b, 0), size) for b in inner]
    n = len(targets) - 1
    targets[0], targets[n] = 0, size
    least = 1 if size >= n else 0
    for r in range(1, n):
        targets[r] = min(max(targets[r], targets[r - 1] + least), size - least * (n - r))
    return tuple(targets)


def spans(bounds: Bounds) -> tuple[Span, ...]:
    """The rows that each rank owns."""
    return tuple(pairwise(bounds))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def per_dim(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    """One number per spatial dim; a single number is repeated."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * n if len(numbers) == 1 else numbers


def zeros_from(shape: Sequence[int], *sources: torch.Tensor | None) -> torch.Tensor:
    """Zeros, usually without elements, that depend on their sources: the backward of a rank that owns nothing runs the
    same functions as on other ranks, and its parameters have gradients."""
    tensors = [t for t in sources if t is not None]
    return sum((t.reshape(-1)[:0].sum() for t in tensors), tensors[0].new_zeros(list(shape)))


Taps = tuple[tuple[int, float], ...]
"""The rows that an output is computed from, and their weights."""


def empty_part(operator: Any, shape: Sequence[int], *args: Any) -> torch.Tensor:
    """Stands for an operator on a rank whose part is empty: zeros that depend on its tensors."""
    return zeros_from(shape, *(a for a in args if isinstance(a, torch.Tensor)))


def pick_rows(x: torch.Tensor, dim: int, order: Sequence[int]) -> torch.Tensor:
    """Rows by index; they may repeat."""
    return x.index_select(dim, torch.tensor(list(order), dtype=torch.int64, device=x.device))


def scale_rows(x: torch.Tensor, dim: int, factors: Sequence[float]) -> torch.Tensor:
    """Each row times its factor."""
    row = torch.tensor(list(factors), dtype=x.dtype, device=x.device)
    return x * row.view(-1, *([1] * (x.dim() - 1 - dim)))


def average_rows(x: torch.Tensor, dim: int, spans: Sequence[Span]) -> torch.Tensor:
    """The mean of each span of rows."""
    lengths = {b - a for a, b in spans}
    if not spans:
        return x.narrow(dim, 0, 0)
    if len(lengths) == 1 and x.shape[dim] == len(spans) * min(lengths):  # they are adjacent
        return x.reshape(*x.shape[:dim], len(spans), -1, *x.shape[dim + 1 :]).mean(dim + 1)
    return torch.cat([x.narrow(dim, a, b - a).mean(dim, keepdim=True) for a, b in spans], dim)


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """The taps of each row of a result."""

    taps: tuple[Taps, ...]
    start: int
    """Index, in the whole, of the first available row."""


def sample_rows(x: torch.Tensor, dim: int, sampling: Sampling) -> torch.Tensor:
    """Rows as weighted sums of rows."""
    return weighted_rows(x, sampling.taps, sampling.start, dim) if sampling.taps else x.narrow(dim, 0, 0)


def weighted_rows(rows: torch.Tensor, taps: tuple[Taps, ...], start: int, dim: int) -> torch.Tensor:
    """Rows by their taps; `start` is the index of the first row."""
    if all(len([w for _, w in t if w]) == 1 and t[_main(t)] == (start + j, 1.0) for j, t in enumerate(taps)):
        return rows.narrow(dim, 0, len(taps))
    half = rows.dtype in (torch.bfloat16, torch.float16)  # half-precision weights would be visible in the image
    source = rows.float() if half else rows
    total: torch.Tensor | None = None
    for k in range(len(taps[0])):
        index = torch.tensor([t[k][0] - start for t in taps], device=rows.device)
        picked = source.index_select(dim, index)
        if any(t[k][1] != 1.0 for t in taps):
            weights = torch.tensor([t[k][1] for t in taps], dtype=source.dtype, device=rows.device)
            picked = picked * weights.view(-1, *([1] * (rows.dim() - 1 - dim)))
        total = picked if total is None else total + picked
    assert total is not None
    return total.to(rows.dtype)


def _main(taps: Taps) -> int:
    return max(range(len(taps)), key=lambda k: taps[k][1])
