"""Losses: each rank has some of the terms, or, of logits that are split by classes, a part of every term."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from ...tracing.running import only_shapes
from .. import moves
from ..moves import Axis
from ..spread import Pass, rule
from ..values import Value
from .pointwise import align

aten = torch.ops.aten

MEAN, SUM = 1, 2


@rule(
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
    aten.kl_div.default,
)
def term_by_term(at: Pass, node: Node, x: Value, y: Value, *args: Any, **kwargs: Any) -> Any:
    """A term for each number: their sum is added up, and a mean divides by the whole count."""
    names = [a.name for a in node.target._schema.arguments][2:]  # type: ignore[union-attr]
    given = dict(zip(names, args, strict=False)) | kwargs
    split = x.layout or y.layout
    if split is None or x.whole != y.whole:
        return NotImplemented
    reduction = given.get("reduction", MEAN)
    x, y = at.split(x, split), at.split(y, split)
    given = {k: align(at, v, split, x.whole) if isinstance(v, Value) else v for k, v in given.items()}
    if reduction == 0:
        return at.value(at.call(node.target, x, y, **given), split)
    given["reduction"] = SUM
    total = at.call(moves.reduce, at.call(node.target, x, y, **given), at.axis)
    return at.value(at.call(aten.div.Tensor, total, x.whole.numel()) if reduction == MEAN else total, None)


@rule(aten.cross_entropy_loss.default)
def cross_entropy(
    at: Pass,
    node: Node,
    x: Value,
    y: Value,
    weight: Value | None = None,
    reduction: int = MEAN,
    ignore: int = -100,
    smoothing: float = 0.0,
) -> Any:
    """Classes lie in dim 1 (dim 0 of one sample)."""
    classes = 1 if x.dim > 1 else 0
    if x.layout is not None and x.layout.dim == classes:
        return _by_classes(at, node, x, y, weight, reduction, ignore, smoothing, classes)
    by_index = y.dim < x.dim
    weight = None if weight is None else at.whole(weight)
    if x.layout is None and (y.layout is None or (not by_index and y.layout.dim == classes)):
        return at.plain(node, (x, y, weight, reduction, ignore, smoothing), {})
    split = x.layout if x.layout is not None else y.split
    if x.layout is None and by_index:
        split = split.at(split.dim + (split.dim >= classes))
    x = at.split(x, split)
    y = at.split(y, split.at(split.dim - (by_index and split.dim > classes)))
    if reduction == 0:
        made = at.call(node.target, x, y, weight, 0, ignore, smoothing)
        return at.value(made, split.at(split.dim - (split.dim > classes)))
    total = at.call(moves.reduce, at.call(node.target, x, y, weight, SUM, ignore, smoothing), at.axis)
    if reduction == MEAN:
        count = at.call(moves.reduce, at.call(terms, x, y, weight, ignore, by_index), at.axis)
        total = at.call(aten.div.Tensor, total, count)
    return at.value(total, None)


@rule(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll(
    at: Pass, node: Node, x: Value, y: Value, weight: Value | None = None, reduction: int = MEAN, ignore: int = -100
) -> Any:
    """As cross-entropy, of what is log-probabilities already; not by classes."""
    if x.dim < 2 or (x.layout is not None and x.layout.dim == 1) or (x.layout is None and y.layout is None):
        return NotImplemented
    split = x.layout if x.layout is not None else y.split.at(y.split.dim + (y.split.dim >= 1))
    x, y = at.split(x, split), at.split(y, split.at(split.dim - (split.dim > 1)))
    weight = None if weight is None else at.whole(weight, enter=True)
    if reduction == 0:
        return at.value(at.call(node.target, x, y, weight, 0, ignore), split.at(split.dim - (split.dim > 1)))
    total = at.call(moves.reduce, at.call(node.target, x, y, weight, SUM, ignore), at.axis)
    if reduction == MEAN:
        count = at.call(moves.reduce, at.call(terms, x, y, weight, ignore, True), at.axis)
        total = at.call(aten.div.Tensor, total, count)
    return at.value(total, None)


def terms(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None, ignore: int, by_index: bool) -> torch.Tensor:
    """What a mean divides by: the targets that count, or their weights."""
    if not by_index:
        return torch.full((), x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
    counts = y != ignore
    if weight is None:
        return counts.sum().to(x.dtype)
    return (weight.detach()[torch.where(counts, y, 0)] * counts).sum().to(x.dtype)


@rule(terms)
def spread_terms(at: Pass, node: Node, x: Value, y: Value, weight: Value | None, ignore: int, by_index: bool) -> Any:
    """Of a graph that was spread before: each rank counts its own."""
    weight = None if weight is None else at.whole(weight)
    count = at.call(terms, x, y, weight, ignore, by_index)
    layout = y.layout if by_index else x.layout
    some = layout is not None and (by_index or layout.dim != 1)
    return at.value(at.call(moves.reduce, count, at.axis) if some else count, None)


def _by_classes(
    at: Pass,
    node: Node,
    x: Value,
    y: Value,
    weight: Value | None,
    reduction: int,
    ignore: int,
    smoothing: float,
    classes: int,
) -> Any:
    """Each rank has some of the classes: neither the logits nor their softmax is ever whole."""
    if weight is not None or y.dim == x.dim or len(x.split.cuts) > 1:
        return NotImplemented
    y = at.whole(y)
    start = x.split.bounds[at.axis.index]
    losses = at.call(class_parallel, x, y, start, x.whole[classes], classes, ignore, smoothing, at.axis)
    if reduction == 0:
        return at.value(losses, None)
    total = at.call(aten.sum.default, losses)
    if reduction == MEAN:
        total = at.call(aten.div.Tensor, total, at.call(terms, x, y, None, ignore, True))
    return at.value(total, None)


def class_parallel(
    x: torch.Tensor, y: torch.Tensor, start: int, size: int, dim: int, ignore: int, smoothing: float, axis: Axis
) -> torch.Tensor:
    """-log softmax at the target, for every target, of logits of which this rank has the classes from `start` on."""
    return _ClassParallel.apply(x, y, start, size, dim, ignore, smoothing, axis)  # type: ignore[no-any-return,no-untyped-call]


class _ClassParallel(torch.autograd.Function):
    """Three small messages: the largest logit, the sum of the exponentials, the target's logit."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        start: int,
        size: int,
        dim: int,
        ignore: int,
        smoothing: float,
        axis: Axis,
    ) -> torch.Tensor:
        counts = y != ignore
        if only_shapes(x):
            ctx.save_for_backward(x)
            return x.new_empty(y.shape)
        wide = x.movedim(dim, -1).to(torch.promote_types(x.dtype, torch.float32))
        top = wide.amax(-1) if wide.shape[-1] else wide.new_full(y.shape, float("-inf"))
        with axis.told("all_reduce", top):
            dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)
        shifted = wide - top.unsqueeze(-1)
        powers = shifted.exp()
        here = counts & (y >= start) & (y < start + wide.shape[-1])
        place = torch.where(here, y - start, 0).unsqueeze(-1)
        chosen = torch.where(here, shifted.gather(-1, place).squeeze(-1), 0.0)
        sums = torch.stack([powers.sum(-1), chosen, *([shifted.sum(-1)] if smoothing else [])])
        with axis.told("all_reduce", sums):
            dist.all_reduce(sums, group=axis.group)
        loss = sums[0].log() - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (sums[0].log() - sums[2] / size)
        ctx.save_for_backward(powers / sums[0].unsqueeze(-1), place, here, counts)
        ctx.dim, ctx.smoothing, ctx.size, ctx.dtype = dim, smoothing, size, x.dtype
        return torch.where(counts, loss, 0.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        soft, place, here, counts = ctx.saved_tensors
        hit = torch.zeros_like(soft).scatter_(-1, place, here.unsqueeze(-1).to(soft.dtype))
        slope = soft - (1 - ctx.smoothing) * hit - ctx.smoothing / ctx.size
        slope = slope * (gradient.to(soft.dtype) * counts).unsqueeze(-1)
        return slope.to(ctx.dtype).movedim(-1, ctx.dim), *([None] * 7)
