"""The pieces that operators on tiles are made of in a graph: each works along one dim and leaves the others alone.

So a graph that was spread along the rows of an image can be spread along its columns too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..window import Span
from .resize import Taps, resampled
from .slide import nothing


def hollow(operator: Any, shape: Sequence[int], *args: Any) -> torch.Tensor:
    """Stands for an operator on a rank whose part has no elements: zeros, mostly none, that hang on its tensors."""
    return nothing(shape, *(a for a in args if isinstance(a, torch.Tensor)))


def picked(x: torch.Tensor, dim: int, order: Sequence[int]) -> torch.Tensor:
    """Rows by their numbers; they may repeat."""
    return x.index_select(dim, torch.tensor(list(order), dtype=torch.int64, device=x.device))


def scaled(x: torch.Tensor, dim: int, factors: Sequence[float]) -> torch.Tensor:
    """Each row times its factor."""
    row = torch.tensor(list(factors), dtype=x.dtype, device=x.device)
    return x * row.view(-1, *([1] * (x.dim() - 1 - dim)))


def averaged(x: torch.Tensor, dim: int, spans: Sequence[Span]) -> torch.Tensor:
    """The mean of each span of rows."""
    lengths = {b - a for a, b in spans}
    if not spans:
        return x.narrow(dim, 0, 0)
    if len(lengths) == 1 and x.shape[dim] == len(spans) * min(lengths):  # they lie side by side
        return x.reshape(*x.shape[:dim], len(spans), -1, *x.shape[dim + 1 :]).mean(dim + 1)
    return torch.cat([x.narrow(dim, a, b - a).mean(dim, keepdim=True) for a, b in spans], dim)


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """What each row of a result is made of."""

    taps: tuple[Taps, ...]
    start: int
    """The number, in the whole, of the first row at hand."""


def sampled(x: torch.Tensor, dim: int, sampling: Sampling) -> torch.Tensor:
    """Rows as weighted sums of rows."""
    return resampled(x, sampling.taps, sampling.start, dim) if sampling.taps else x.narrow(dim, 0, 0)
