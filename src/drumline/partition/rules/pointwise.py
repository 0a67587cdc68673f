"""Elementwise operators: all operands follow the split of the largest."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...torchkit.operators import to_copy
from ..operator_properties import mutates
from ..sharding.layout import ShardedValue, Split, map_values, values_in
from ..sharding_pass import ShardingPass, rule
from .common import per_rank_dropout

aten = torch.ops.aten


@rule(
    "pointwise",
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    to_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.type_as.default,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.__xor__.Tensor,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.selu.default,
    aten.relu6.default,
    aten.log_sigmoid.default,
    aten.clip.default,
    aten.true_divide.Tensor,
    aten.multiply.Tensor,
    aten.subtract.Tensor,
    aten.negative.default,
    aten.absolute.default,
    aten.divide.Tensor,
    aten.square.default,
    aten.float_power.Tensor_Scalar,
    aten.celu.default,
    aten.hardswish.default,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
)
def pointwise(ctx: ShardingPass, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Operands that have the dim are split alike; those that are broadcast along it stay whole."""
    if mutates(node) or not isinstance(node.meta["val"], torch.Tensor):
        return NotImplemented
    shape = node.meta["val"].shape
    want = _common(values_in((args, kwargs)), shape)
    args = map_values(args, lambda v: align(ctx, v, want, shape))
    kwargs = map_values(kwargs, lambda v: align(ctx, v, want, shape))
    return ctx.value(ctx.call(node.target, *args, **kwargs), want)


@rule(aten.prelu.default)
def prelu(ctx: ShardingPass, node: Node, x: ShardedValue, w: ShardedValue) -> Any:
    """One slope, or one per channel (dim 1)."""
    by_channel = w.whole.numel() > 1
    want = x.layout if x.layout is not None else w.split.along(1)
    w = ctx.split(w, want.along(0)) if by_channel and want.dim == 1 else ctx.whole(w, enter=True)
    return ctx.value(ctx.call(node.target, ctx.split(x, want), w), want)


@rule(aten.glu.default)
def glu(ctx: ShardingPass, node: Node, x: ShardedValue, dim: int = -1) -> Any:
    """Its halves must be split alike: along the split dim, as two runs of the same segments."""
    if x.split.dim != dim % x.dim:
        return ctx.value(ctx.call(node.target, x, dim), x.layout)
    half = len(x.split.cuts) // 2
    if x.split.cuts[:half] != x.split.cuts[half:]:
        return NotImplemented
    return ctx.value(ctx.call(node.target, x, dim), Split(x.split.dim, x.split.cuts[:half]))


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def new(ctx: ShardingPass, node: Node, x: ShardedValue, *args: Any, **kwargs: Any) -> Any:
    """Only the tensor's type counts: the result is whole."""
    return ctx.value(ctx.call(node.target, x, *args, **kwargs), None)


@rule(aten.dropout.default, aten.feature_dropout.default)
def dropout(ctx: ShardingPass, node: Node, x: ShardedValue, p: float, train: bool) -> Any:
    """Parts of one tensor draw their own random numbers; ranks draw the same only for a whole tensor."""
    if not train or p == 0.0:
        return ctx.value(ctx.call(node.target, x, p, train), x.layout)
    if node.target is aten.feature_dropout.default and x.split.dim > 1:
        return ctx.value(ctx.call(node.target, x, p, train), x.layout)  # all parts of a channel must agree: one seed
    return ctx.value(ctx.call(per_rank_dropout, x, node.target, p, ctx.axis.index), x.layout)


def align(ctx: ShardingPass, v: ShardedValue, want: Split, shape: torch.Size) -> ShardedValue:
    """Split or gather an operand that is broadcast to `shape`, whose split is `want`."""
    dim = want.dim - (len(shape) - v.dim)
    if dim < 0 or (v.whole[dim] == 1 and shape[want.dim] != 1):
        return ctx.whole(v, enter=True)
    return ctx.split(v, want.along(dim))


def _common(values: list[ShardedValue], shape: torch.Size) -> Split:
    """The split of the largest operand that has one, in the dims of the result."""
    largest = max((v for v in values if v.layout is not None), key=lambda v: v.whole.numel())
    return largest.split.along(largest.split.dim + len(shape) - largest.dim)
