"""Norms: local where what they average over is not split, with statistics over the ranks where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..moves import Axis
from ..spatial.norm import group_norm_over, instance_norm
from ..spatial.norm import layer_norm as layer_norm_over
from ..spread import Pass, rule
from ..statistics import Spans, spanning_batch_norm
from ..values import Value
from .local import alone, local_shape, operator_of, own, scaled_cuts

aten = torch.ops.aten


@rule(aten.layer_norm.default)
def layer_norm(
    at: Pass,
    node: Node,
    x: Value,
    shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Any:
    """Over the last dims."""
    if x.layout is None:
        return NotImplemented
    if x.split.dim >= x.dim - len(shape):
        return _over_split_dims(at, node, x, shape, weight, bias, eps)
    scale = [None if v is None else at.whole(v, enter=True) for v in (weight, bias)]
    return at.value(at.call(node.target, x, list(shape), *scale, eps, cudnn), x.layout)


@rule(aten.rms_norm.default)
def rms_norm(
    at: Pass, node: Node, x: Value, shape: Sequence[int], weight: Value | None = None, eps: float | None = None
) -> Any:
    """Over the last dims."""
    if x.layout is None or x.split.dim >= x.dim - len(shape):
        return NotImplemented
    scale = None if weight is None else at.whole(weight, enter=True)
    return at.value(at.call(node.target, x, list(shape), scale, eps), x.layout)


def _over_split_dims(
    at: Pass, node: Node, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> Any:
    """Layer norm over dims of which each rank has a part: its statistics run over the ranks."""
    dim = x.split.dim
    if len(x.split.cuts) > 1 or any(x.split.length(r) == 0 for r in range(at.axis.size)):
        return NotImplemented
    place = x.split.at(dim - (x.dim - len(shape)))
    scale = [None if v is None else at.split(v, place) for v in (weight, bias)]
    made = at.call(layer_norm_over, x, list(shape), *scale, eps, dim, x.split.bounds, at.axis)
    return at.value(made, x.layout)


@rule(layer_norm_over)
def spread_layer_norm(
    at: Pass, node: Node, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, *args: Any
) -> Any:
    """Of a graph that was spread before: along the dims that it does not average over."""
    if x.layout is None or x.split.dim >= x.dim - len(shape):
        return NotImplemented
    scale = [None if v is None else at.whole(v, enter=True) for v in (weight, bias)]
    return at.value(at.call(node.target, x, list(shape), *scale, *args), x.layout)


# -- over channels and space


def _for_channels(at: Pass, x: Value, *weights: Value | None) -> list[Value | None]:
    """Weights as the channels lie: a part of them, or whole for work that is split."""
    if x.split.dim == 1:
        return [None if w is None else at.split(w, x.split.at(0)) for w in weights]
    return [None if w is None else at.whole(w, enter=True) for w in weights]


@rule(aten.group_norm.default)
def group_norm(
    at: Pass,
    node: Node,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Any:
    """Whole groups are local; groups that are cut, and images, have statistics over the ranks."""
    if x.layout is None:
        return NotImplemented
    if x.split.dim == 0:
        return alone(at, node, x, groups, *_for_channels(at, x, weight, bias), eps, cudnn)
    if x.split.dim > 1:
        scale = _for_channels(at, x, weight, bias)
        return at.value(at.call(group_norm_over, x, *scale, groups, eps, 0, x.whole[1], (at.axis,)), x.layout)
    local = scaled_cuts(x.split, 1, x.whole[1] // groups, 1)
    if local is None:
        return _cut_groups(at, x, weight, bias, groups, eps, ())
    scale = _for_channels(at, x, weight, bias)
    own_groups = local.length(at.axis.index)
    shape = local_shape(at, node, x.split)
    return at.value(own(at, operator_of(node), shape, x, own_groups, *scale, eps, cudnn), x.layout)


def _cut_groups(
    at: Pass, x: Value, weight: Value | None, bias: Value | None, groups: int, eps: float, axes: tuple[Axis, ...]
) -> Any:
    if len(x.split.cuts) > 1:
        return NotImplemented
    first, scale = x.split.bounds[at.axis.index], _for_channels(at, x, weight, bias)
    made = at.call(group_norm_over, x, *scale, groups, eps, first, x.whole[1], (*axes, at.axis))
    return at.value(made, x.layout)


@rule(group_norm_over)
def spread_group_norm(
    at: Pass,
    node: Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    groups: int,
    eps: float,
    first: int,
    channels: int,
    axes: tuple[Axis, ...],
) -> Any:
    """Of a graph that was spread before: one more axis, or some of the groups."""
    if x.layout is None:
        return NotImplemented
    if x.split.dim == 1:
        if channels != x.whole[1]:
            return NotImplemented
        local = scaled_cuts(x.split, 1, channels // groups, 1)
        if local is None:
            return _cut_groups(at, x, weight, bias, groups, eps, axes)
        scale = _for_channels(at, x, weight, bias)
        count, size = local.length(at.axis.index), x.split.length(at.axis.index)
        if count == 0:
            return NotImplemented
        return at.value(at.call(node.target, x, *scale, count, eps, 0, size, axes), x.layout)
    scale = _for_channels(at, x, weight, bias)
    more = (at.axis,) if x.split.dim > 1 else ()
    return at.value(at.call(node.target, x, *scale, groups, eps, first, channels, (*axes, *more)), x.layout)


@rule(aten.batch_norm.default)
def batch_norm(
    at: Pass,
    node: Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    """As one that spans nobody yet."""
    return spread_batch_norm(at, node, x, weight, bias, mean, var, training, momentum, eps, Spans())


@rule(spanning_batch_norm)
def spread_batch_norm(
    at: Pass,
    node: Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    spans: Spans,
) -> Any:
    """Over samples and space the statistics span the axis; channels are each rank's own. Running ones stay whole."""
    if x.layout is None or any(v is not None and v.layout is not None for v in (mean, var)):
        return NotImplemented
    if x.split.dim == 1:
        if spans.channels is not None:
            return NotImplemented
        spans = spans.by_channels(x.split, at.axis)
    elif training:
        spans = spans.over(at.axis)
    scale = _for_channels(at, x, weight, bias)
    made = at.call(spanning_batch_norm, x, *scale, mean, var, training, momentum, eps, spans)
    return at.value(made, x.layout)


@rule(aten.instance_norm.default)
def norm_of_instances(
    at: Pass,
    node: Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    use_input: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    """Space: statistics over the ranks. Samples and channels: local, where there are no running statistics."""
    if x.layout is None:
        return NotImplemented
    if x.split.dim > 1:
        return spread_instance_norm(at, node, x, weight, bias, mean, var, use_input, momentum, eps, ())
    if mean is not None or var is not None:
        return NotImplemented
    return alone(at, node, x, *_for_channels(at, x, weight, bias), None, None, use_input, momentum, eps, cudnn)


@rule(instance_norm)
def spread_instance_norm(
    at: Pass,
    node: Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    use_input: bool,
    momentum: float,
    eps: float,
    axes: tuple[Axis, ...],
) -> Any:
    """Of a graph that was spread before: one more axis, or some of the samples or channels."""
    if x.layout is None or (x.split.dim < 2 and not (mean is None and var is None)):
        return NotImplemented
    scale = _for_channels(at, x, weight, bias)
    axes = (*axes, at.axis) if x.split.dim > 1 and use_input else axes
    made = at.call(instance_norm, x, *scale, mean, var, use_input, momentum, eps, axes)
    return at.value(made, x.layout)
