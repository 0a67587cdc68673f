"""Norms: local where the averaged dims are not split, with statistics over the ranks where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..batch_statistics import StatisticsSpan, synchronized_batch_norm
from ..sharding.layout import ShardedValue
from ..sharding.redistribution import Axis
from ..sharding_pass import ShardingPass, rule
from ..spatial.norm import group_norm_over, instance_norm
from ..spatial.norm import layer_norm as layer_norm_over
from .common import call_on_part, local_shape, operator_of, part_by_part, scaled_cuts

aten = torch.ops.aten


@rule(aten.layer_norm.default)
def layer_norm(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    shape: Sequence[int],
    weight: ShardedValue | None = None,
    bias: ShardedValue | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Any:
    """Over the last dims."""
    if x.layout is None:
        return NotImplemented
    if x.split.dim >= x.dim - len(shape):
        return _over_split_dims(ctx, node, x, shape, weight, bias, eps)
    scale = [None if v is None else ctx.whole(v, enter=True) for v in (weight, bias)]
    return ctx.value(ctx.call(node.target, x, list(shape), *scale, eps, cudnn), x.layout)


@rule(aten.rms_norm.default)
def rms_norm(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    shape: Sequence[int],
    weight: ShardedValue | None = None,
    eps: float | None = None,
) -> Any:
    """Over the last dims."""
    if x.layout is None or x.split.dim >= x.dim - len(shape):
        return NotImplemented
    scale = None if weight is None else ctx.whole(weight, enter=True)
    return ctx.value(ctx.call(node.target, x, list(shape), scale, eps), x.layout)


def _over_split_dims(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    shape: Sequence[int],
    weight: ShardedValue | None,
    bias: ShardedValue | None,
    eps: float,
) -> Any:
    """Layer norm over split dims: its statistics span the ranks."""
    dim = x.split.dim
    if len(x.split.cuts) > 1 or any(x.split.length(r) == 0 for r in range(ctx.axis.size)):
        return NotImplemented
    place = x.split.along(dim - (x.dim - len(shape)))
    scale = [None if v is None else ctx.split(v, place) for v in (weight, bias)]
    result = ctx.call(layer_norm_over, x, list(shape), *scale, eps, dim, x.split.bounds, ctx.axis)
    return ctx.value(result, x.layout)


@rule(layer_norm_over)
def sharded_layer_norm(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    shape: Sequence[int],
    weight: ShardedValue | None,
    bias: ShardedValue | None,
    *args: Any,
) -> Any:
    """After an earlier pass: along the dims that it does not average over."""
    if x.layout is None or x.split.dim >= x.dim - len(shape):
        return NotImplemented
    scale = [None if v is None else ctx.whole(v, enter=True) for v in (weight, bias)]
    return ctx.value(ctx.call(node.target, x, list(shape), *scale, *args), x.layout)


# -- over channels and space


def _for_channels(ctx: ShardingPass, x: ShardedValue, *weights: ShardedValue | None) -> list[ShardedValue | None]:
    """Weights split as the channels are, or whole for split work."""
    if x.split.dim == 1:
        return [None if w is None else ctx.split(w, x.split.along(0)) for w in weights]
    return [None if w is None else ctx.whole(w, enter=True) for w in weights]


@rule(aten.group_norm.default)
def group_norm(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    groups: int,
    weight: ShardedValue | None = None,
    bias: ShardedValue | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Any:
    """Whole groups are local; groups that are cut, and images, have statistics over the ranks."""
    if x.layout is None:
        return NotImplemented
    if x.split.dim == 0:
        return part_by_part(ctx, node, x, groups, *_for_channels(ctx, x, weight, bias), eps, cudnn)
    if x.split.dim > 1:
        scale = _for_channels(ctx, x, weight, bias)
        return ctx.value(ctx.call(group_norm_over, x, *scale, groups, eps, 0, x.whole[1], (ctx.axis,)), x.layout)
    local = scaled_cuts(x.split, 1, x.whole[1] // groups, 1)
    if local is None:
        return _cut_groups(ctx, x, weight, bias, groups, eps, ())
    scale = _for_channels(ctx, x, weight, bias)
    own_groups = local.length(ctx.axis.index)
    shape = local_shape(ctx, node, x.split)
    return ctx.value(call_on_part(ctx, operator_of(node), shape, x, own_groups, *scale, eps, cudnn), x.layout)


def _cut_groups(
    ctx: ShardingPass,
    x: ShardedValue,
    weight: ShardedValue | None,
    bias: ShardedValue | None,
    groups: int,
    eps: float,
    axes: tuple[Axis, ...],
) -> Any:
    if len(x.split.cuts) > 1:
        return NotImplemented
    first, scale = x.split.bounds[ctx.axis.index], _for_channels(ctx, x, weight, bias)
    result = ctx.call(group_norm_over, x, *scale, groups, eps, first, x.whole[1], (*axes, ctx.axis))
    return ctx.value(result, x.layout)


@rule(group_norm_over)
def sharded_group_norm(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    weight: ShardedValue | None,
    bias: ShardedValue | None,
    groups: int,
    eps: float,
    first: int,
    channels: int,
    axes: tuple[Axis, ...],
) -> Any:
    """After an earlier pass: one more axis, or some of the groups."""
    if x.layout is None:
        return NotImplemented
    if x.split.dim == 1:
        if channels != x.whole[1]:
            return NotImplemented
        local = scaled_cuts(x.split, 1, channels // groups, 1)
        if local is None:
            return _cut_groups(ctx, x, weight, bias, groups, eps, axes)
        scale = _for_channels(ctx, x, weight, bias)
        count, size = local.length(ctx.axis.index), x.split.length(ctx.axis.index)
        if count == 0:
            return NotImplemented
        return ctx.value(ctx.call(node.target, x, *scale, count, eps, 0, size, axes), x.layout)
    scale = _for_channels(ctx, x, weight, bias)
    more = (ctx.axis,) if x.split.dim > 1 else ()
    return ctx.value(ctx.call(node.target, x, *scale, groups, eps, first, channels, (*axes, *more)), x.layout)


@rule(aten.batch_norm.default)
def batch_norm(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    weight: ShardedValue | None,
    bias: ShardedValue | None,
    mean: ShardedValue | None,
    var: ShardedValue | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    """As a synchronized one that spans no axis yet."""
    return sharded_batch_norm(ctx, node, x, weight, bias, mean, var, training, momentum, eps, StatisticsSpan())


@rule(synchronized_batch_norm)
def sharded_batch_norm(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    weight: ShardedValue | None,
    bias: ShardedValue | None,
    mean: ShardedValue | None,
    var: ShardedValue | None,
    training: bool,
    momentum: float,
    eps: float,
    spans: StatisticsSpan,
) -> Any:
    """Split samples or space: statistics span the axis. Split channels: each rank its own. Running statistics stay
    whole."""
    if x.layout is None or any(v is not None and v.layout is not None for v in (mean, var)):
        return NotImplemented
    if x.split.dim == 1:
        if spans.channels is not None:
            return NotImplemented
        spans = spans.by_channels(x.split, ctx.axis)
    elif training:
        spans = spans.over_axis(ctx.axis)
    scale = _for_channels(ctx, x, weight, bias)
    result = ctx.call(synchronized_batch_norm, x, *scale, mean, var, training, momentum, eps, spans)
    return ctx.value(result, x.layout)


@rule(aten.instance_norm.default)
def instance_norm_rule(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    weight: ShardedValue | None,
    bias: ShardedValue | None,
    mean: ShardedValue | None,
    var: ShardedValue | None,
    use_input: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    """Space: statistics over the ranks. Samples and channels: local, if there are no running statistics."""
    if x.layout is None:
        return NotImplemented
    if x.split.dim > 1:
        return sharded_instance_norm(ctx, node, x, weight, bias, mean, var, use_input, momentum, eps, ())
    if mean is not None or var is not None:
        return NotImplemented
    return part_by_part(ctx, node, x, *_for_channels(ctx, x, weight, bias), None, None, use_input, momentum, eps, cudnn)


@rule(instance_norm)
def sharded_instance_norm(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    weight: ShardedValue | None,
    bias: ShardedValue | None,
    mean: ShardedValue | None,
    var: ShardedValue | None,
    use_input: bool,
    momentum: float,
    eps: float,
    axes: tuple[Axis, ...],
) -> Any:
    """After an earlier pass: one more axis, or some of the samples or channels."""
    if x.layout is None or (x.split.dim < 2 and not (mean is None and var is None)):
        return NotImplemented
    scale = _for_channels(ctx, x, weight, bias)
    axes = (*axes, ctx.axis) if x.split.dim > 1 and use_input else axes
    result = ctx.call(instance_norm, x, *scale, mean, var, use_input, momentum, eps, axes)
    return ctx.value(result, x.layout)
