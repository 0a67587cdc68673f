"""What slides along a split dim: which rows of the output a rank owns, and which rows of the input it needs for them.

A rank owns the outputs whose centre lies in the rows that it owns of the input, so that hardly anything travels but the
halo, and a skip connection meets a convolution at the same bounds. Where there are outputs for all, no rank is without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from ..layout import Bounds
from ..window import Span


@dataclass(frozen=True, slots=True)
class Slide:
    """The plan of an operator along a split dim."""

    wanted: tuple[Span, ...]
    """The rows of the input that each rank needs."""
    bounds: Bounds
    """Of the output."""

    def out(self, rank: int) -> Span:
        """The rows of the output that a rank owns."""
        return self.bounds[rank], self.bounds[rank + 1]


@lru_cache(maxsize=4096)
def slide(
    bounds: Bounds, kernel: int, stride: int, before: int, after: int, dilation: int = 1, ceil: bool = False
) -> Slide:
    """A kernel that slides over the rows, with `before` and `after` rows of padding: convolution and pooling."""
    size, reach = bounds[-1], (kernel - 1) * dilation
    steps = size + before + after - reach - 1
    count = (-(-steps // stride) if ceil else steps // stride) + 1
    if ceil and (count - 1) * stride >= size + before:
        count -= 1  # a kernel must begin inside the rows or the padding before them
    out = settled((ceil_div(2 * (b + before) - reach, 2 * stride) for b in bounds), count)
    return Slide(
        tuple((a * stride - before, (b - 1) * stride - before + reach + 1) if a < b else (0, 0) for a, b in spans(out)),
        out,
    )


@lru_cache(maxsize=4096)
def slide_transposed(bounds: Bounds, kernel: int, stride: int, before: int, count: int, dilation: int = 1) -> Slide:
    """Row i of the input is spread over rows i * stride - before + k * dilation of `count` outputs."""
    size, reach = bounds[-1], (kernel - 1) * dilation
    out = settled((ceil_div(2 * (b * stride - before) + reach + 1 - stride, 2) for b in bounds), count)

    def needed(a: int, b: int) -> Span:
        first, last = max(0, ceil_div(a + before - reach, stride)), min(size, (b - 1 + before) // stride + 1)
        return (first, last) if a < b and first < last else (0, 0)

    return Slide(tuple(needed(a, b) for a, b in spans(out)), out)


def settled(inner: Iterable[int], size: int) -> Bounds:
    """Bounds made of wishes: from 0 to size, never falling, and no rank without rows if there are enough."""
    wishes = [min(max(b, 0), size) for b in inner]
    n = len(wishes) - 1
    wishes[0], wishes[n] = 0, size
    least = 1 if size >= n else 0
    for r in range(1, n):
        wishes[r] = min(max(wishes[r], wishes[r - 1] + least), size - least * (n - r))
    return tuple(wishes)


def spans(bounds: Bounds) -> tuple[Span, ...]:
    """What each rank owns."""
    return tuple(pairwise(bounds))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def each(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    """One number per spatial dim; one number stands for all."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * n if len(given) == 1 else given


def nothing(shape: Sequence[int], *sources: torch.Tensor | None) -> torch.Tensor:
    """A tensor of zeros, mostly without elements, that hangs on its sources: the backward of a rank that owns nothing
    visits the same functions as everybody's, and its parameters have gradients."""
    tensors = [t for t in sources if t is not None]
    return sum((t.reshape(-1)[:0].sum() for t in tensors), tensors[0].new_zeros(list(shape)))
