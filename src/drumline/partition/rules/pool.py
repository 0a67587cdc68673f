"""Pooling with kernels: along the split dim kernels slide as those of convolutions, over a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...torchkit.schemas import schema_of
from ..sharding.layout import ShardedValue, Split
from ..sharding_pass import ShardingPass, rule
from ..spatial.pool import lowest, strides_of, true_counts, unpadded_rows
from ..spatial.rows import SlidePlan, per_dim, plan_slide, scale_rows
from .common import call_on_part, local_shape, operator_of, part_by_part, reads_indices, rows_of, with_indices

aten = torch.ops.aten

_MAX = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}


@rule(*_MAX.values())
def max_pool(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Any:
    """Rows beyond the image are filled with the lowest value."""
    n = _dims(operator_of(node))
    if x.split.dim < x.dim - n:
        return part_by_part(ctx, node, x, kernel, list(stride), *_lists(n, padding, dilation), ceil)
    if len(x.split.cuts) > 1:
        return NotImplemented
    k, plan, geometry = _plan(x, n, kernel, stride, padding, dilation, ceil)
    kernels, strides, sides, steps = geometry
    rows, split = rows_of(ctx, x, plan.wanted, lowest(x.fake.dtype)), Split(x.split.dim, (plan.bounds,))
    sides[k] = 0
    shape = local_shape(ctx, node, split)
    return ctx.value(call_on_part(ctx, _MAX[n], shape, rows, kernels, strides, sides, steps, ceil), split)


@rule(aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(ctx: ShardingPass, node: Node, x: ShardedValue, kernel: Any, *args: Any) -> Any:
    """Along rows only if the indices are not read: they refer to the whole image."""
    n = _dims(operator_of(node))
    if x.split.dim < x.dim - n:
        return with_indices(ctx, node, x, kernel, *args)
    if reads_indices(node) or len(x.split.cuts) > 1:
        return NotImplemented
    defaults: tuple[Any, ...] = ((), 0, 1, False)
    stride, padding, dilation, ceil = (*args, *defaults[len(args) :])
    k, plan, (kernels, strides, sides, steps) = _plan(x, n, kernel, stride, padding, dilation, ceil)
    split, whole = Split(x.split.dim, (plan.bounds,)), node.meta["val"][0].shape
    shape = list(whole)
    shape[split.dim] = split.length(ctx.axis.index)
    sides[k] = 0
    rows = rows_of(ctx, x, plan.wanted, lowest(x.fake.dtype))
    return [ShardedValue(call_on_part(ctx, _MAX[n], shape, rows, kernels, strides, sides, steps, ceil), split, whole)]


@rule(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    """The operator sees no padding along the split dim: rows that had some are rescaled to their true counts."""
    n, operator = _dims(operator_of(node)), operator_of(node)
    more = () if n == 1 else (divisor,)
    if x.split.dim < x.dim - n:
        return part_by_part(ctx, node, x, kernel, list(stride), *_lists(n, padding), ceil, include_pad, *more)
    if len(x.split.cuts) > 1:
        return NotImplemented
    k, plan, (kernels, strides, sides, _) = _plan(x, n, kernel, stride, padding, 1, ceil)
    split, out = Split(x.split.dim, (plan.bounds,)), plan.out(ctx.axis.index)
    edges = unpadded_rows(x.split.bounds, ctx.axis)
    true = true_counts(out, x.whole[split.dim], kernels[k], strides[k], sides[k], include_pad, edges)
    rows, sides[k] = rows_of(ctx, x, plan.wanted), 0
    shape = local_shape(ctx, node, split)
    result = call_on_part(ctx, operator, shape, rows, kernels, strides, sides, ceil, include_pad, *more)
    if divisor is None and any(count != kernels[k] for count in true):
        result = ctx.call(scale_rows, result, split.dim, tuple(kernels[k] / count for count in true))
    return ctx.value(result, split)


def _lists(n: int, *given: Any) -> list[list[int]]:
    return [list(per_dim(g, n)) for g in given]


def _dims(operator: Any) -> int:
    """Number of spatial dims, by the operator's name: max_pool2d has two."""
    return int(next(c for c in schema_of(operator).name if c in "123"))


def _plan(
    x: ShardedValue, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> tuple[int, SlidePlan, tuple[list[int], list[int], list[int], list[int]]]:
    """The split spatial dim, the plan along it, and the geometry of all spatial dims."""
    kernels: Sequence[int] = per_dim(kernel, n)
    strides, sides, steps = strides_of(kernels, stride), list(per_dim(padding, n)), per_dim(dilation, n)
    k = x.split.dim - (x.dim - n)
    plan = plan_slide(x.split.bounds, kernels[k], strides[k], sides[k], sides[k], steps[k], ceil)
    return k, plan, (list(kernels), list(strides), sides, list(steps))
