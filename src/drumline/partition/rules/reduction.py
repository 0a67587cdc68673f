"""Sums, means and operators along a dim: local where the dim is not split, reduced where it is."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...torchkit.operators import log_softmax, softmax
from ...torchkit.schemas import argument_names
from ..sharding import redistribution
from ..sharding.layout import ShardedValue, Split
from ..sharding_pass import ShardingPass, rule

aten = torch.ops.aten


def _dims(dim: Any, dims: int) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(dims))
    return [d + dims if d < 0 else d for d in (dim if isinstance(dim, list | tuple) else [dim])]


def kept(split: Split, dims: Sequence[int], keepdim: bool) -> Split:
    """The split after a reduction of other dims."""
    return split if keepdim else split.along(split.dim - sum(d < split.dim for d in dims))


@rule(aten.sum.dim_IntList, aten.mean.dim)
def over_dims(
    ctx: ShardingPass, node: Node, x: ShardedValue, dim: Any, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Over some dims."""
    dims = _dims(dim, x.dim)
    more = {} if dtype is None else {"dtype": dtype}
    if x.split.dim not in dims:
        return ctx.value(ctx.call(node.target, x, dims, keepdim, **more), kept(x.split, dims, keepdim))
    total = ctx.call(redistribution.reduce_partial, ctx.call(aten.sum.dim_IntList, x, dims, keepdim, **more), ctx.axis)
    if node.target is aten.mean.dim:
        count = 1
        for d in dims:
            count *= x.whole[d]
        total = ctx.call(aten.div.Tensor, total, count)
    return ctx.value(total, None)


@rule(aten.sum.default, aten.mean.default)
def over_all(ctx: ShardingPass, node: Node, x: ShardedValue, *, dtype: Any = None) -> Any:
    """Over everything."""
    more = {} if dtype is None else {"dtype": dtype}
    total = ctx.call(redistribution.reduce_partial, ctx.call(aten.sum.default, x, **more), ctx.axis)
    if node.target is aten.mean.default:
        total = ctx.call(aten.div.Tensor, total, x.whole.numel())
    return ctx.value(total, None)


@rule(
    aten.softmax.int,
    aten.log_softmax.int,
    softmax.default,
    log_softmax.default,
    aten.logsumexp.default,
    aten.amax.default,
    aten.amin.default,
    aten.argmax.default,
    aten.var.correction,
    aten.std.correction,
    aten.any.dim,
    aten.all.dim,
    aten.prod.dim_int,
    aten.var.dim,
    aten.std.dim,
    aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim,
)
def along(ctx: ShardingPass, node: Node, x: ShardedValue, *args: Any, **kwargs: Any) -> Any:
    """Along dims that are not split."""
    names = argument_names(node.target)
    arguments = dict(zip(names[1:], args, strict=False)) | kwargs
    if arguments.get("dim") is None:
        return NotImplemented
    dims = _dims(arguments["dim"], x.dim)
    if x.split.dim in dims:
        return NotImplemented
    same = node.meta["val"].dim() == x.dim
    return ctx.value(ctx.call(node.target, x, *args, **kwargs), kept(x.split, dims, same))


@rule(aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default)
def with_indices(ctx: ShardingPass, node: Node, x: ShardedValue, *args: Any, **kwargs: Any) -> Any:
    """Values and indices along a dim that is not split."""
    names = argument_names(node.target)
    arguments = dict(zip(names[1:], args, strict=False)) | kwargs
    dims = _dims(arguments.get("dim", -1), x.dim)
    if x.split.dim in dims:
        return NotImplemented
    result = ctx.call(node.target, x, *args, **kwargs)
    shapes = [v.shape for v in node.meta["val"]]
    split = kept(x.split, dims, len(shapes[0]) == x.dim)
    return [ShardedValue(ctx.call(operator.getitem, result, i), split, s) for i, s in enumerate(shapes)]
