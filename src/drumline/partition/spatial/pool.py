"""Pooling along a split dim, in one to three spatial dims: with kernels, and to a given size.

Kernels slide as those of convolutions. To a size of one, all ranks pool together, and each has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...torchkit.fake_tensors import is_shape_only
from ..sharding.halo_exchange import window
from ..sharding.layout import Bounds
from ..sharding.redistribution import Axis, reduce_partial
from .rows import SlidePlan, ceil_div, feasible_bounds, per_dim, plan_slide, spans, zeros_from

_MAX: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Callable[..., Any]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_TO_MAX: dict[int, Callable[..., Any]] = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
_TO_AVERAGE: dict[int, Callable[..., Any]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}

Numbers = int | Sequence[int]


def max_pool(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    ceil: bool,
    dim: int,
    bounds: Bounds,
    axis: Axis,
) -> tuple[torch.Tensor, Bounds]:
    """This rank's rows of the maxima, and their bounds. An empty stride is the kernel's size."""
    n, dim = len(kernel), dim % x.dim()
    at = dim - (x.dim() - n)
    strides, sides, steps = strides_of(kernel, stride), list(per_dim(padding, n)), per_dim(dilation, n)
    plan = plan_slide(bounds, kernel[at], strides[at], sides[at], sides[at], steps[at], ceil)
    rows = window(x, dim, bounds, plan.wanted, axis, lowest(x.dtype))
    sides[at] = 0
    if rows.shape[dim] == 0:
        return zeros_from(_pooled(rows, kernel, strides, sides, steps, ceil, at), rows), plan.bounds
    out: torch.Tensor = _MAX[n](rows, kernel, strides, sides, steps, ceil)
    return out, plan.bounds


def avg_pool(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Numbers,
    padding: Numbers,
    ceil: bool,
    include_pad: bool,
    divisor: int | None,
    dim: int,
    bounds: Bounds,
    axis: Axis,
) -> tuple[torch.Tensor, Bounds]:
    """This rank's rows of the averages, and their bounds."""
    n, dim = len(kernel), dim % x.dim()
    at = dim - (x.dim() - n)
    strides, sides = strides_of(kernel, stride), list(per_dim(padding, n))
    plan = plan_slide(bounds, kernel[at], strides[at], sides[at], sides[at], 1, ceil)
    edges = unpadded_rows(bounds, axis)
    counts = true_counts(plan.out(axis.index), bounds[-1], kernel[at], strides[at], sides[at], include_pad, edges)
    rows = window(x, dim, bounds, plan.wanted, axis)
    sides[at] = 0
    if rows.shape[dim] == 0:
        return zeros_from(_pooled(rows, kernel, strides, sides, (1,) * n, ceil, at), rows), plan.bounds
    if divisor is not None:
        out: torch.Tensor = _AVERAGE[n](rows, kernel, strides, sides, ceil, include_pad, divisor)
        return out, plan.bounds
    out = _AVERAGE[n](rows, kernel, strides, sides, ceil, include_pad)
    if any(count != kernel[at] for count in counts):  # torch divided by the whole kernel, as it saw no padding
        factors = torch.tensor([kernel[at] / count for count in counts], dtype=x.dtype, device=x.device)
        out = out * factors.view(-1, *([1] * (x.dim() - 1 - dim)))
    return out, plan.bounds


def adaptive_avg_pool(
    x: torch.Tensor, size: Sequence[int], dim: int, bounds: Bounds, axis: Axis
) -> tuple[torch.Tensor, Bounds | None]:
    """Averages over a given number of parts. To one part along the split dim: whole on every rank, no bounds."""
    n, dim = len(size), dim % x.dim()
    at = dim - (x.dim() - n)
    if size[at] == 1:
        total = reduce_partial(x.sum(dim, keepdim=True) / bounds[-1], axis)
        out: torch.Tensor = _TO_AVERAGE[n](total, list(size))
        return out, None
    return _adaptive(_TO_AVERAGE[n], x, size, at, dim, bounds, axis)


def adaptive_max_pool(
    x: torch.Tensor, size: Sequence[int], dim: int, bounds: Bounds, axis: Axis
) -> tuple[torch.Tensor, Bounds | None]:
    """Maxima over a given number of parts, without indices. To one part: whole on every rank, no bounds."""
    n, dim = len(size), dim % x.dim()
    at = dim - (x.dim() - n)
    if size[at] != 1:
        return _adaptive(_TO_MAX[n], x, size, at, dim, bounds, axis)
    out_size = [*x.shape[: x.dim() - n], *size]
    if x.shape[dim] == 0:
        mine = zeros_from(out_size, x) + lowest(x.dtype)
        indices = torch.zeros(out_size, dtype=torch.int64, device=x.device)
    else:
        mine, indices = _TO_MAX[n](x, list(size), return_indices=True)
    whole = _global_indices(indices, x.shape[x.dim() - n :], at, bounds, axis.index)
    return _GlobalMax.apply(mine, whole, axis), None  # type: ignore[no-untyped-call]  # torch's own


@lru_cache(maxsize=4096)
def adaptive(bounds: Bounds, count: int) -> SlidePlan:
    """Plan: output o pools rows [o size / count, (o + 1) size / count), rounded outwards."""
    size = bounds[-1]
    out = feasible_bounds((ceil_div(2 * b * count - size, 2 * size) for b in bounds), count)
    parts = ((_part(a, size, count)[0], _part(b - 1, size, count)[1]) if a < b else (0, 0) for a, b in spans(out))
    return SlidePlan(tuple(parts), out)


def parts(out: tuple[int, int], size: int, count: int) -> list[tuple[int, int]]:
    """The rows that each of some outputs pools."""
    return [_part(o, size, count) for o in range(*out)]


def global_max_pool(x: torch.Tensor, size: Sequence[int], dim: int, bounds: Bounds, axis: Axis) -> torch.Tensor:
    """`adaptive_max_pool` to one row."""
    return adaptive_max_pool(x, size, dim, bounds, axis)[0]


def _part(o: int, size: int, count: int) -> tuple[int, int]:
    return o * size // count, ceil_div((o + 1) * size, count)


def _adaptive(
    pool: Callable[..., Any], x: torch.Tensor, size: Sequence[int], at: int, dim: int, bounds: Bounds, axis: Axis
) -> tuple[torch.Tensor, Bounds]:
    """One row of outputs at a time, as their parts may overlap; all at once where the parts are equal."""
    plan = adaptive(bounds, size[at])
    a, b = plan.out(axis.index)
    start = plan.wanted[axis.index][0]
    rows = window(x, dim, bounds, plan.wanted, axis.with_halo)  # borders between tiles are not edges of the image
    if a == b:
        return zeros_from([*x.shape[: x.dim() - len(size)], *size[:at], 0, *size[at + 1 :]], rows), plan.bounds
    if bounds[-1] % size[at] == 0:
        out: torch.Tensor = pool(rows, [*size[:at], b - a, *size[at + 1 :]])
        return out, plan.bounds
    one, parts = [*size[:at], 1, *size[at + 1 :]], []
    for o in range(a, b):
        first, last = _part(o, bounds[-1], size[at])
        parts.append(pool(rows.narrow(dim, first - start, last - first), one))
    return torch.cat(parts, dim), plan.bounds


class _GlobalMax(torch.autograd.Function):
    """The maxima over the ranks. The gradient goes to the rank that had the maximum; of equals, to the first in the
    image."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: torch.Tensor, axis: Axis) -> torch.Tensor:
        if is_shape_only(x) or axis.size == 1:
            ctx.save_for_backward(torch.ones_like(x, dtype=torch.bool))
            return x.clone()
        mine, place = x.contiguous(), indices.contiguous()
        values, where = ([torch.empty_like(t) for _ in range(axis.size)] for t in (mine, place))
        with axis.observe("all_gather", mine):
            dist.all_gather(values, mine, group=axis.group)
            dist.all_gather(where, place, group=axis.group)
        highest = torch.stack(values).amax(0)
        hits = [(v == highest) | (v.isnan() & highest.isnan()) for v in values]
        far = torch.iinfo(torch.int64).max
        first = torch.stack([torch.where(hit, w, far) for hit, w in zip(hits, where, strict=True)]).argmin(0)
        ctx.save_for_backward(first == axis.index)
        return highest

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (won,) = ctx.saved_tensors
        return gradient * won, None, None


def _global_indices(indices: torch.Tensor, local: Sequence[int], at: int, bounds: Bounds, rank: int) -> torch.Tensor:
    """Flat indices in this rank's part -> flat indices in the whole; a rank without rows comes last."""
    if local[at] == 0:
        return torch.full_like(indices, torch.iinfo(torch.int64).max)
    inner = 1
    for length in local[at + 1 :]:
        inner *= length
    row = indices // inner
    outer, row = row // local[at], row % local[at]
    return (outer * bounds[-1] + row + bounds[rank]) * inner + indices % inner


def strides_of(kernel: Sequence[int], stride: Numbers) -> tuple[int, ...]:
    return per_dim(stride, len(kernel)) if isinstance(stride, int) or len(stride) else tuple(kernel)


def true_counts(
    out: tuple[int, int], size: int, kernel: int, stride: int, padding: int, include_pad: bool, edges: tuple[int, int]
) -> list[int]:
    """Rows that each output averages over: including padding, but not what is beyond it.

    `edges`: the rows that count if padding does not.
    """
    counts = []
    for o in range(*out):
        start = o * stride - padding
        stop = min(start + kernel, size + padding)
        counts.append(stop - start if include_pad else max(1, min(stop, edges[1]) - max(start, edges[0])))
    return counts


def unpadded_rows(bounds: Bounds, axis: Axis) -> tuple[int, int]:
    """The rows that are not padding for this rank: all, or without a halo its own."""
    return (0, bounds[-1]) if axis.halo else (bounds[axis.index], bounds[axis.index + 1])


def _pooled(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
    at: int,
) -> list[int]:
    """The shape of a pooled tensor without rows in the split dim."""
    n = len(kernel)
    geometry = zip(x.shape[x.dim() - n :], kernel, stride, padding, padding, dilation, strict=True)
    sizes = [0 if i == at else plan_slide((0, size), *of, ceil).bounds[-1] for i, (size, *of) in enumerate(geometry)]
    return [*x.shape[: x.dim() - n], *sizes]


def lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
