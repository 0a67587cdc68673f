"""Losses: each rank has some of the terms or, of logits split by classes, a part of every term."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from ...torchkit.fake_tensors import is_shape_only
from ...torchkit.schemas import argument_names
from ..sharding import redistribution
from ..sharding.layout import ShardedValue
from ..sharding.redistribution import Axis
from ..sharding_pass import ShardingPass, rule
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
def term_by_term(ctx: ShardingPass, node: Node, x: ShardedValue, y: ShardedValue, *args: Any, **kwargs: Any) -> Any:
    """One term per value: the sum is reduced, and a mean divides by the whole count."""
    names = argument_names(node.target)[2:]
    given = dict(zip(names, args, strict=False)) | kwargs
    split = x.layout or y.layout
    if split is None or x.whole != y.whole:
        return NotImplemented
    reduction = given.get("reduction", MEAN)
    x, y = ctx.split(x, split), ctx.split(y, split)
    given = {k: align(ctx, v, split, x.whole) if isinstance(v, ShardedValue) else v for k, v in given.items()}
    if reduction == 0:
        return ctx.value(ctx.call(node.target, x, y, **given), split)
    given["reduction"] = SUM
    total = ctx.call(redistribution.reduce_partial, ctx.call(node.target, x, y, **given), ctx.axis)
    return ctx.value(ctx.call(aten.div.Tensor, total, x.whole.numel()) if reduction == MEAN else total, None)


@rule(aten.cross_entropy_loss.default)
def cross_entropy(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    y: ShardedValue,
    weight: ShardedValue | None = None,
    reduction: int = MEAN,
    ignore: int = -100,
    smoothing: float = 0.0,
) -> Any:
    """Classes are in dim 1 (dim 0 of a single sample)."""
    classes = 1 if x.dim > 1 else 0
    if x.layout is not None and x.layout.dim == classes:
        return _by_classes(ctx, node, x, y, weight, reduction, ignore, smoothing, classes)
    by_index = y.dim < x.dim
    weight = None if weight is None else ctx.whole(weight)
    if x.layout is None and (y.layout is None or (not by_index and y.layout.dim == classes)):
        return ctx.on_whole_tensors(node, (x, y, weight, reduction, ignore, smoothing), {})
    split = x.layout if x.layout is not None else y.split
    if x.layout is None and by_index:
        split = split.along(split.dim + (split.dim >= classes))
    x = ctx.split(x, split)
    y = ctx.split(y, split.along(split.dim - (by_index and split.dim > classes)))
    if reduction == 0:
        result = ctx.call(node.target, x, y, weight, 0, ignore, smoothing)
        return ctx.value(result, split.along(split.dim - (split.dim > classes)))
    total = ctx.call(
        redistribution.reduce_partial, ctx.call(node.target, x, y, weight, SUM, ignore, smoothing), ctx.axis
    )
    if reduction == MEAN:
        count = ctx.call(
            redistribution.reduce_partial, ctx.call(mean_divisor, x, y, weight, ignore, by_index), ctx.axis
        )
        total = ctx.call(aten.div.Tensor, total, count)
    return ctx.value(total, None)


@rule(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    y: ShardedValue,
    weight: ShardedValue | None = None,
    reduction: int = MEAN,
    ignore: int = -100,
) -> Any:
    """As cross entropy, of log-probabilities; not by classes."""
    if x.dim < 2 or (x.layout is not None and x.layout.dim == 1) or (x.layout is None and y.layout is None):
        return NotImplemented
    split = x.layout if x.layout is not None else y.split.along(y.split.dim + (y.split.dim >= 1))
    x, y = ctx.split(x, split), ctx.split(y, split.along(split.dim - (split.dim > 1)))
    weight = None if weight is None else ctx.whole(weight, enter=True)
    if reduction == 0:
        return ctx.value(ctx.call(node.target, x, y, weight, 0, ignore), split.along(split.dim - (split.dim > 1)))
    total = ctx.call(redistribution.reduce_partial, ctx.call(node.target, x, y, weight, SUM, ignore), ctx.axis)
    if reduction == MEAN:
        count = ctx.call(redistribution.reduce_partial, ctx.call(mean_divisor, x, y, weight, ignore, True), ctx.axis)
        total = ctx.call(aten.div.Tensor, total, count)
    return ctx.value(total, None)


def mean_divisor(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None, ignore: int, by_index: bool
) -> torch.Tensor:
    """The divisor of a mean: the number of targets that count, or their weights."""
    if not by_index:
        return torch.full((), x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
    counts = y != ignore
    if weight is None:
        return counts.sum().to(x.dtype)
    return (weight.detach()[torch.where(counts, y, 0)] * counts).sum().to(x.dtype)


@rule(mean_divisor)
def sharded_mean_divisor(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    y: ShardedValue,
    weight: ShardedValue | None,
    ignore: int,
    by_index: bool,
) -> Any:
    """After an earlier pass: each rank counts its own."""
    weight = None if weight is None else ctx.whole(weight)
    count = ctx.call(mean_divisor, x, y, weight, ignore, by_index)
    layout = y.layout if by_index else x.layout
    some = layout is not None and (by_index or layout.dim != 1)
    return ctx.value(ctx.call(redistribution.reduce_partial, count, ctx.axis) if some else count, None)


def _by_classes(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    y: ShardedValue,
    weight: ShardedValue | None,
    reduction: int,
    ignore: int,
    smoothing: float,
    classes: int,
) -> Any:
    """Each rank has some of the classes: neither the logits nor their softmax is ever gathered."""
    if weight is not None or y.dim == x.dim or len(x.split.cuts) > 1:
        return NotImplemented
    y = ctx.whole(y)
    start = x.split.bounds[ctx.axis.index]
    losses = ctx.call(class_parallel, x, y, start, x.whole[classes], classes, ignore, smoothing, ctx.axis)
    if reduction == 0:
        return ctx.value(losses, None)
    total = ctx.call(aten.sum.default, losses)
    if reduction == MEAN:
        total = ctx.call(aten.div.Tensor, total, ctx.call(mean_divisor, x, y, None, ignore, True))
    return ctx.value(total, None)


def class_parallel(
    x: torch.Tensor, y: torch.Tensor, start: int, size: int, dim: int, ignore: int, smoothing: float, axis: Axis
) -> torch.Tensor:
    """-log softmax at every target, of logits of which this rank has the classes from `start` on."""
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
        if is_shape_only(x):
            ctx.save_for_backward(x)
            return x.new_empty(y.shape)
        wide = x.movedim(dim, -1).to(torch.promote_types(x.dtype, torch.float32))
        top = wide.amax(-1) if wide.shape[-1] else wide.new_full(y.shape, float("-inf"))
        with axis.observe("all_reduce", top):
            dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)
        shifted = wide - top.unsqueeze(-1)
        powers = shifted.exp()
        here = counts & (y >= start) & (y < start + wide.shape[-1])
        place = torch.where(here, y - start, 0).unsqueeze(-1)
        chosen = torch.where(here, shifted.gather(-1, place).squeeze(-1), 0.0)
        sums = torch.stack([powers.sum(-1), chosen, *([shifted.sum(-1)] if smoothing else [])])
        with axis.observe("all_reduce", sums):
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
