"""Operators that work number by number: the split of the largest operand is everybody's."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..layout import Split
from ..random import forked_dropout
from ..spread import Pass, rule
from ..tidy import changes_something
from ..values import Value, each, values_in

aten = torch.ops.aten


@rule(
    "pointwise",
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
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
def pointwise(at: Pass, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Others are cut alike where they have the dim, and stay whole where they are broadcast along it."""
    if changes_something(node) or not isinstance(node.meta["val"], torch.Tensor):
        return NotImplemented
    shape = node.meta["val"].shape
    want = _common(values_in((args, kwargs)), shape)
    args = each(args, lambda v: align(at, v, want, shape))
    kwargs = each(kwargs, lambda v: align(at, v, want, shape))
    return at.value(at.call(node.target, *args, **kwargs), want)


@rule(aten.prelu.default)
def prelu(at: Pass, node: Node, x: Value, w: Value) -> Any:
    """A slope for all numbers, or one for each channel (dim 1)."""
    by_channel = w.whole.numel() > 1
    want = x.layout if x.layout is not None else w.split.at(1)
    w = at.split(w, want.at(0)) if by_channel and want.dim == 1 else at.whole(w, enter=True)
    return at.value(at.call(node.target, at.split(x, want), w), want)


@rule(aten.glu.default)
def glu(at: Pass, node: Node, x: Value, dim: int = -1) -> Any:
    """Its halves must lie alike: along the split dim, as two runs of the same segments."""
    if x.split.dim != dim % x.dim:
        return at.value(at.call(node.target, x, dim), x.layout)
    half = len(x.split.cuts) // 2
    if x.split.cuts[:half] != x.split.cuts[half:]:
        return NotImplemented
    return at.value(at.call(node.target, x, dim), Split(x.split.dim, x.split.cuts[:half]))


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def new(at: Pass, node: Node, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Only the type of the tensor counts: the result is whole."""
    return at.value(at.call(node.target, x, *args, **kwargs), None)


@rule(aten.dropout.default, aten.feature_dropout.default)
def dropout(at: Pass, node: Node, x: Value, p: float, train: bool) -> Any:
    """Parts of one tensor draw numbers of their own; the same on every rank only where the tensor is."""
    if not train or p == 0.0:
        return at.value(at.call(node.target, x, p, train), x.layout)
    if node.target is aten.feature_dropout.default and x.split.dim > 1:
        return at.value(at.call(node.target, x, p, train), x.layout)  # all parts of a channel must agree: one seed
    return at.value(at.call(forked_dropout, x, node.target, p, at.axis.index), x.layout)


def align(at: Pass, v: Value, want: Split, shape: torch.Size) -> Value:
    """An operand of something that is broadcast to `shape` and split as `want`."""
    dim = want.dim - (len(shape) - v.dim)
    if dim < 0 or (v.whole[dim] == 1 and shape[want.dim] != 1):
        return at.whole(v, enter=True)
    return at.split(v, want.at(dim))


def _common(values: list[Value], shape: torch.Size) -> Split:
    """The split of the largest operand that has one, in the dims of the result."""
    largest = max((v for v in values if v.layout is not None), key=lambda v: v.whole.numel())
    return largest.split.at(largest.split.dim + len(shape) - largest.dim)
