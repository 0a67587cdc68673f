"""Convolutions, plain and transposed: by channels (outputs of a column, inputs of a row, whole groups), by samples, and
along the rows of an image, where a window fetches the rows of other ranks and the convolution stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..sharding.layout import ShardedValue, Split
from ..sharding_pass import ShardingPass, rule
from ..spatial.conv import paddings
from ..spatial.rows import per_dim, plan_slide, plan_transposed_slide
from .common import call_on_part, local_shape, operator_of, rows_of, scaled_cuts
from .matmul import contract

aten = torch.ops.aten

_CONV = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
_TRANSPOSED = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}


@rule(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
def conv(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    w: ShardedValue,
    b: ShardedValue | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """x: (samples, inputs, ...), w: (outputs, inputs / groups, ...)."""
    if x.dim != w.dim:
        return NotImplemented
    if _is_spatial(x, w):
        return _along_rows(ctx, node, x, w, b, stride, padding, dilation, groups)
    layer = _Layer(operator_of(node), groups, 0, 1, (*_lists(w, stride, padding, dilation), groups))
    return _by_channels(ctx, node, layer, x, w, b)


@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    w: ShardedValue,
    b: ShardedValue | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """x: (samples, inputs, ...), w: (inputs, outputs / groups, ...)."""
    if x.dim != w.dim:
        return NotImplemented
    if _is_spatial(x, w):
        return _along_rows_transposed(ctx, node, x, w, b, stride, padding, output_padding, groups, dilation)
    stride, padding, output_padding, dilation = _lists(w, stride, padding, output_padding, dilation)
    layer = _Layer(operator_of(node), groups, 1, 0, (stride, padding, output_padding, groups, dilation))
    return _by_channels(ctx, node, layer, x, w, b)


def _lists(w: ShardedValue, *given: Any) -> list[Any]:
    """One number per spatial dim; words stay words."""
    return [g if isinstance(g, str) else list(per_dim(g, w.dim - 2)) for g in given]


def _is_spatial(x: ShardedValue, w: ShardedValue) -> bool:
    return w.layout is None and x.layout is not None and x.layout.dim > 1


# -- channels and samples


@dataclass(frozen=True, slots=True)
class _Layer:
    """A convolution as an operator on channels."""

    operator: Any
    groups: int
    output_dim: int
    """The weight's dim of outputs."""
    input_dim: int
    """The weight's dim of inputs."""
    rest: tuple[Any, ...]
    """The arguments after the bias; the fourth is the number of groups."""

    def call(
        self, ctx: ShardingPass, node: Node, x: ShardedValue, w: ShardedValue, b: ShardedValue | None, groups: int
    ) -> Node:
        """Call on this rank's channels, with their number of groups."""
        rest = [*self.rest[:3], groups, *self.rest[4:]]
        many = w.fake.shape[self.output_dim] * (groups if self.output_dim else 1)
        shape = [x.fake.shape[0], many, *node.meta["val"].shape[2:]]
        return call_on_part(ctx, self.operator, shape, x, w, b, *rest)


def _by_channels(
    ctx: ShardingPass, node: Node, layer: _Layer, x: ShardedValue, w: ShardedValue, b: ShardedValue | None
) -> Any:
    if w.layout is not None and w.layout.dim > 1:
        return NotImplemented
    if layer.groups == 1:
        return _one_group(ctx, node, layer, x, w, b)
    if w.layout is None and x.layout is not None and x.layout.dim == 0:
        w, b = ctx.whole(w, enter=True), None if b is None else ctx.whole(b, enter=True)
        return ctx.value(layer.call(ctx, node, x, w, b, layer.groups), x.layout)
    return _whole_groups(ctx, node, layer, x, w, b)


def _one_group(
    ctx: ShardingPass, node: Node, layer: _Layer, x: ShardedValue, w: ShardedValue, b: ShardedValue | None
) -> Any:
    blank = " " * (x.dim - 2)
    names, kernel = "ni" + blank, ("oi" if layer.output_dim == 0 else "io") + blank

    def emit(v: Sequence[ShardedValue]) -> Node:
        return layer.call(ctx, node, v[0], v[1], v[2] if len(v) > 2 else None, 1)

    if w.layout is not None and (x.layout is None or x.layout.dim != 1 or w.layout.dim != layer.input_dim):
        x = ctx.whole(x)  # the weight's split decides
    by_inputs = x.layout is not None and x.layout.dim == 1
    summed = by_inputs if w.layout is None else w.layout.dim == layer.input_dim
    if b is not None and not summed:
        return contract(ctx, (x, w, b), (names, kernel, "o"), "no" + blank, emit)
    result = contract(ctx, (x, w), (names, kernel), "no" + blank, emit)
    if result is NotImplemented or b is None:
        return result
    return _add(ctx, result, b)


def _add(ctx: ShardingPass, result: ShardedValue, b: ShardedValue) -> ShardedValue:
    """Add a bias after the reduction; it is split by channels where the sum is."""
    by_channels = result.layout is not None and result.layout.dim == 1
    b = ctx.split(b, Split(0, result.split.cuts)) if by_channels else ctx.whole(b, enter=result.layout is not None)
    bias = ctx.call(aten.reshape.default, b, [1, -1, *([1] * (result.dim - 2))])
    return ShardedValue(ctx.call(aten.add.Tensor, result, bias), result.layout, result.whole)


def _whole_groups(
    ctx: ShardingPass, node: Node, layer: _Layer, x: ShardedValue, w: ShardedValue, b: ShardedValue | None
) -> Any:
    """Each rank has some of the groups, with their inputs and outputs."""
    inputs, outputs = x.whole[1] // layer.groups, node.meta["val"].shape[1] // layer.groups
    per_weight = outputs if layer.output_dim == 0 else inputs
    groups = None
    if w.layout is not None:
        groups = scaled_cuts(w.layout, 1, per_weight, 0) if w.layout.dim == 0 else None
    elif x.layout is not None and x.layout.dim == 1:
        groups = scaled_cuts(x.layout, 1, inputs, 0)
    elif b is not None and b.layout is not None:
        groups = scaled_cuts(b.layout, 1, outputs, 0)
    if groups is None:
        return NotImplemented
    x, w = ctx.split(x, _times(groups, inputs, 1)), ctx.split(w, _times(groups, per_weight, 0))
    b = None if b is None else ctx.split(b, _times(groups, outputs, 0))
    result = layer.call(ctx, node, x, w, b, groups.length(ctx.axis.index))
    return ctx.value(result, _times(groups, outputs, 1))


def _times(groups: Split, per_group: int, dim: int) -> Split:
    split = scaled_cuts(groups, per_group, 1, dim)
    assert split is not None
    return split


# -- along the rows of an image


def _along_rows(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    w: ShardedValue,
    b: ShardedValue | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Any:
    """Fetch the rows that this rank's outputs need, then convolve without padding in that dim."""
    if len(x.split.cuts) > 1:
        return NotImplemented
    n, k = w.dim - 2, x.split.dim - 2
    kernel, strides, steps = tuple(w.whole[2:]), per_dim(stride, n), per_dim(dilation, n)
    before, after = paddings(padding, kernel, steps)
    plan = plan_slide(x.split.bounds, kernel[k], strides[k], before[k], after[k], steps[k])
    split = Split(x.split.dim, (plan.bounds,))
    rows = rows_of(ctx, x, plan.wanted)
    sides = [0 if i == k else before[i] for i in range(n)]
    extra = [0 if i == k else after[i] - before[i] for i in range(n)]
    if any(extra):
        rows = ctx.call(aten.constant_pad_nd.default, rows, [side for e in reversed(extra) for side in (0, e)], 0.0)
    w, b = ctx.whole(w, enter=True), None if b is None else ctx.whole(b, enter=True)
    settings = (list(strides), sides, list(steps), groups)
    return ctx.value(call_on_part(ctx, _CONV[n], local_shape(ctx, node, split), rows, w, b, *settings), split)


def _along_rows_transposed(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    w: ShardedValue,
    b: ShardedValue | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Any:
    """Fetch the rows that reach this rank's outputs, convolve without cropping in that dim, and crop to the outputs."""
    if len(x.split.cuts) > 1:
        return NotImplemented
    n, dim = w.dim - 2, x.split.dim
    k = dim - 2
    kernel, strides, steps = tuple(w.whole[2:]), per_dim(stride, n), per_dim(dilation, n)
    sides, further = list(per_dim(padding, n)), list(per_dim(output_padding, n))
    plan = plan_transposed_slide(x.split.bounds, kernel[k], strides[k], sides[k], node.meta["val"].shape[dim], steps[k])
    split = Split(dim, (plan.bounds,))
    (first, last), (a, z) = plan.wanted[ctx.axis.index], plan.out(ctx.axis.index)
    start = first * strides[k] - sides[k] if first < last else a
    stop = (last - 1) * strides[k] - sides[k] + steps[k] * (kernel[k] - 1) + 1 if first < last else a
    sides[k] = further[k] = 0
    # Outputs that no input reaches are the bias alone. Whether there are any is equal on all ranks of a later axis, but
    # not of this one, which sends no message after this point.
    inside = start <= a and z <= stop
    rows = rows_of(ctx, x, plan.wanted)
    w, bias = ctx.whole(w, enter=True), None if b is None or not inside else ctx.whole(b, enter=True)
    shape = local_shape(ctx, node, split)
    shape[dim] = stop - start
    settings = (list(strides), sides, further, groups, list(steps))
    result = call_on_part(ctx, _TRANSPOSED[n], shape, rows, w, bias, *settings)
    if (start, stop) != (a, z):
        result = ctx.call(aten.constant_pad_nd.default, result, [*([0, 0] * (n - 1 - k)), start - a, z - stop], 0.0)
    out = ctx.value(result, split)
    return out if inside or b is None else _add(ctx, out, b)
