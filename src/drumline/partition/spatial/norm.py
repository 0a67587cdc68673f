"""Norms with statistics over ranks: batch, group, instance and layer norm of a split tensor.

Forward: every rank computes the mean and variance of its part; one all-gather per axis brings them together, and they
are combined without loss of precision. Backward: one all-reduce per axis, of the two sums that the gradient of the
input needs. Gradients of weights are this rank's partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...torchkit.fake_tensors import is_shape_only
from ..sharding.layout import Bounds
from ..sharding.redistribution import Axis
from .rows import zeros_from

OptionalTensor = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StatisticsGroups:
    """Which values of a tensor (samples, channels, ...) share a mean: the group of each channel, and the ranks."""

    first: int
    """Index of this rank's first channel."""
    width: int
    """Channels per group."""
    groups: int
    batch: bool
    """Whether samples share it too."""
    axes: tuple[Axis, ...]
    present: bool = True
    """False: this rank's values do not count (a stand-in sample)."""


def group_norm(
    x: torch.Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    groups: int,
    eps: float,
    dim: int,
    bounds: Bounds,
    axis: Axis,
) -> torch.Tensor:
    """Group norm of a tensor split along its channels (dim 1) or a later dim. Weights are whole, or a part."""
    if dim % x.dim() != 1:
        return group_norm_over(x, weight, bias, groups, eps, 0, x.shape[1], (axis,))
    weight, bias = _own_part(weight, bounds, axis), _own_part(bias, bounds, axis)
    start, stop, width = bounds[axis.index], bounds[axis.index + 1], bounds[-1] // groups
    if all(b % width == 0 for b in bounds):
        if start == stop:
            return zeros_from(x.shape, x, weight, bias)
        return F.group_norm(x, (stop - start) // width, weight, bias, eps)
    return group_norm_over(x, weight, bias, groups, eps, start, bounds[-1], (axis,))


def group_norm_over(
    x: torch.Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    groups: int,
    eps: float,
    first: int,
    channels: int,
    axes: Sequence[Axis],
) -> torch.Tensor:
    """Group norm over all ranks of the axes. `first` is this rank's first of the whole's `channels`."""
    return _normalized(x, weight, bias, eps, StatisticsGroups(first, channels // groups, groups, False, tuple(axes)))[0]


def batch_norm(
    x: torch.Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    training: bool,
    momentum: float,
    eps: float,
    axes: Sequence[Axis],
    *,
    present: bool = True,
) -> torch.Tensor:
    """Batch norm over all ranks of the axes; running statistics advance as torch's do."""
    if not training:
        if x.numel() == 0:
            return zeros_from(x.shape, x, weight, bias)
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    groups = StatisticsGroups(0, 1, x.shape[1], True, tuple(axes), present)
    out, mean, variance, count = _normalized(x, weight, bias, eps, groups)
    _advance(running_mean, running_var, mean, variance, count, momentum)
    return out


def instance_norm(
    x: torch.Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    use_input: bool,
    momentum: float,
    eps: float,
    axes: Sequence[Axis],
) -> torch.Tensor:
    """Instance norm, over all ranks of the axes."""
    if not use_input:
        return batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, axes)
    out, mean, variance, count = _normalized(
        x, weight, bias, eps, StatisticsGroups(0, 1, x.shape[1], False, tuple(axes))
    )
    _advance(running_mean, running_var, mean, variance, count, momentum)
    return out


def layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: OptionalTensor,
    bias: OptionalTensor,
    eps: float,
    dim: int,
    bounds: Bounds,
    axis: Axis,
) -> torch.Tensor:
    """Layer norm over the last dims, whose whole sizes are `shape`. Weights are whole, or this rank's part."""
    dim %= x.dim()
    outer = x.dim() - len(shape)
    if dim < outer:
        return F.layer_norm(x, list(shape), weight, bias, eps)
    rows = math.prod(x.shape[:outer])
    half = x.dtype in (torch.bfloat16, torch.float16)
    wide = x.float() if half else x
    groups = StatisticsGroups(0, 1, rows, False, (axis,))
    out = _normalized(wide.reshape(1, rows, -1), None, None, eps, groups)[0].view(x.shape)
    weight, bias = _own_part(weight, bounds, axis, dim - outer), _own_part(bias, bounds, axis, dim - outer)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


# -- statistics


def _normalized(
    x: torch.Tensor, weight: OptionalTensor, bias: OptionalTensor, eps: float, groups: StatisticsGroups
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normalized tensor, and mean, variance and count of every group."""
    return _Normalize.apply(x, weight, bias, eps, groups)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


class _Normalize(torch.autograd.Function):
    """weight * (x - mean) / std + bias, with mean and variance over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: OptionalTensor, bias: OptionalTensor, eps: float, groups: StatisticsGroups
    ) -> tuple[torch.Tensor, ...]:
        ctx.groups, ctx.biased = groups, bias is not None
        wide = _wide(x)
        if is_shape_only(x):  # the operators below would take milliseconds, and the shapes are known
            samples = 1 if groups.batch else len(x)
            mean, variance, count = (wide.new_empty(samples, groups.groups) for _ in range(3))
            ctx.save_for_backward(x, weight, mean, variance, count)
            ctx.mark_non_differentiable(mean, variance, count)
            return x.new_empty(x.shape), mean, variance, count
        mean, variance, count = _statistics(wide, groups)
        rstd = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, rstd, count)
        group_map = _GroupMap(groups, wide)
        scale = group_map.to_channels(rstd)
        shift = -group_map.to_channels(mean) * scale
        if weight is not None:
            scale, shift = scale * weight.to(scale.dtype), shift * weight.to(scale.dtype)
        if bias is not None:
            shift = shift + bias.to(shift.dtype)
        out = torch.addcmul(shift.unsqueeze(2), wide, scale.unsqueeze(2)).view(x.shape).to(x.dtype)
        ctx.mark_non_differentiable(mean, variance, count)
        return out, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, mean, rstd, count = ctx.saved_tensors
        groups: StatisticsGroups = ctx.groups
        wide, dy = _wide(x), _wide(gradients[0])
        group_map = _GroupMap(groups, wide)
        m, r = group_map.to_channels(mean), group_map.to_channels(rstd)
        total = dy.sum(2)
        product = (dy * wide).sum(2) - m * total  # the sum of dy (x - mean)
        d_weight = None if weight is None else (product * r).sum(0).to(weight.dtype)
        d_bias = total.sum(0) if ctx.biased else None
        factor = weight.to(dy.dtype) if weight is not None else dy.new_ones(())
        sums = torch.stack([group_map.to_groups(total * factor), group_map.to_groups(product * factor)])
        if not groups.present:  # its values were not in the statistics, so no other rank's loss depends on them
            sums = torch.zeros_like(sums)
        for axis in groups.axes:
            _all_reduce(sums, axis)
        if not groups.present:
            return torch.zeros_like(x), d_weight, d_bias, None, None
        slope = -group_map.to_channels(rstd.pow(3) * sums[1] / count)
        shift = -group_map.to_channels(rstd * sums[0] / count) - slope * m
        dx = torch.addcmul(dy * (r * factor).unsqueeze(2), wide, slope.unsqueeze(2)).add_(shift.unsqueeze(2))
        return dx.view(x.shape).to(x.dtype), d_weight, d_bias, None, None


class _GroupMap:
    """Maps between values per (sample, channel) and values per (sample, group), or (1, group) if samples share."""

    def __init__(self, groups: StatisticsGroups, wide: torch.Tensor) -> None:
        self._samples, self._channels = wide.shape[:2]
        self._groups = groups
        self._each = groups.width == 1 and groups.groups == self._channels
        channels = torch.arange(groups.first, groups.first + self._channels, device=wide.device)
        self._member = torch.div(channels, groups.width, rounding_mode="floor")

    def to_groups(self, cells: torch.Tensor) -> torch.Tensor:
        """Sums of each group, on this rank."""
        if not self._each:
            cells = cells.new_zeros(self._samples, self._groups.groups).index_add(1, self._member, cells)
        return cells.sum(0, keepdim=True) if self._groups.batch else cells

    def to_channels(self, groups: torch.Tensor) -> torch.Tensor:
        """Each group's value at its channels."""
        wide = groups if self._each else groups.index_select(1, self._member)
        return wide.expand(self._samples, self._channels)


def _statistics(wide: torch.Tensor, groups: StatisticsGroups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, variance and count of every group over all ranks, from those of the parts."""
    wide = wide.detach()
    samples, channels, length = wide.shape
    if wide.numel():
        variance, mean = torch.var_mean(wide, 2, correction=0)
    else:
        variance = mean = wide.new_zeros(samples, channels)
    count = wide.new_full((samples, channels), float(length) if groups.present else 0.0)
    group_map = _GroupMap(groups, wide)
    mean, variance, count = _merged(mean, variance, count, group_map.to_groups, group_map.to_channels)
    for axis in groups.axes:
        means, variances, counts = _all_gather(torch.stack([mean, variance, count]), axis).unbind(1)
        mean, variance, count = _merged(means, variances, counts, _over_ranks, lambda t: t)
    return mean, variance, count


def _merged(
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the statistics of what `total` adds up."""
    whole = total(count)
    some = whole.clamp(min=1)
    middle = total(mean * count) / some
    return middle, total((variance + (mean - back(middle)).square()) * count) / some, whole


def _over_ranks(table: torch.Tensor) -> torch.Tensor:
    return table.sum(0)


def _advance(
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: torch.Tensor,
    momentum: float,
) -> None:
    """Advance the running statistics, by the mean over samples where each has its own."""
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.mean(0).to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_var.lerp_(unbiased.mean(0).to(running_var.dtype), momentum)


# -- messages


def _all_gather(table: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The tables of all ranks, stacked."""
    if is_shape_only(table):
        return table.new_empty(axis.size, *table.shape)
    if axis.size == 1:
        return table.unsqueeze(0)
    parts = [torch.empty_like(table) for _ in range(axis.size)]
    with axis.observe("all_gather", table):
        dist.all_gather(parts, table, group=axis.group)
    return torch.stack(parts)


def _all_reduce(sums: torch.Tensor, axis: Axis) -> None:
    """All-reduce in place."""
    if not is_shape_only(sums) and axis.size > 1:
        with axis.observe("all_reduce", sums):
            dist.all_reduce(sums, group=axis.group)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """As (samples, channels, rest); half precision in float32, as in torch's kernels."""
    wide = x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))
    return wide.float() if x.dtype in (torch.bfloat16, torch.float16) else wide


def _own_part(weight: OptionalTensor, bounds: Bounds, axis: Axis, dim: int = 0) -> OptionalTensor:
    """This rank's part of a weight; a part stays as it is."""
    if weight is None or weight.shape[dim] != bounds[-1]:
        return weight
    start, stop = bounds[axis.index], bounds[axis.index + 1]
    return weight if stop - start == bounds[-1] else weight.narrow(dim, start, stop - start)
