"""Pools with kernels: along the split dim they slide as convolutions do, out of a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..layout import Split
from ..spatial.pieces import scaled
from ..spatial.pool import lowest, seen_rows, strides_of, true_counts
from ..spatial.slide import Slide, each, slide
from ..spread import Pass, rule
from ..values import Value
from .local import alone, local_shape, operator_of, own, reads_places, rows_of, with_places

aten = torch.ops.aten

_MAX = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}


@rule(*_MAX.values())
def max_pool(
    at: Pass,
    node: Node,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Any:
    """Rows beyond the image are lower than any other."""
    n = _dims(operator_of(node))
    if x.split.dim < x.dim - n:
        return alone(at, node, x, kernel, list(stride), *_lists(n, padding, dilation), ceil)
    if len(x.split.cuts) > 1:
        return NotImplemented
    k, plan, of = _plan(x, n, kernel, stride, padding, dilation, ceil)
    kernels, strides, sides, steps = of
    rows, split = rows_of(at, x, plan.wanted, lowest(x.fake.dtype)), Split(x.split.dim, (plan.bounds,))
    sides[k] = 0
    shape = local_shape(at, node, split)
    return at.value(own(at, _MAX[n], shape, rows, kernels, strides, sides, steps, ceil), split)


@rule(aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_poolwith_places(at: Pass, node: Node, x: Value, kernel: Any, *args: Any) -> Any:
    """Along rows only where nobody reads the places: they count the numbers of the whole image."""
    n = _dims(operator_of(node))
    if x.split.dim < x.dim - n:
        return with_places(at, node, x, kernel, *args)
    if reads_places(node) or len(x.split.cuts) > 1:
        return NotImplemented
    defaults: tuple[Any, ...] = ((), 0, 1, False)
    stride, padding, dilation, ceil = (*args, *defaults[len(args) :])
    k, plan, (kernels, strides, sides, steps) = _plan(x, n, kernel, stride, padding, dilation, ceil)
    split, whole = Split(x.split.dim, (plan.bounds,)), node.meta["val"][0].shape
    shape = list(whole)
    shape[split.dim] = split.length(at.axis.index)
    sides[k] = 0
    rows = rows_of(at, x, plan.wanted, lowest(x.fake.dtype))
    return [Value(own(at, _MAX[n], shape, rows, kernels, strides, sides, steps, ceil), split, whole)]


@rule(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    at: Pass,
    node: Node,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    """The operator sees no padding along the split dim: rows that had some are scaled to their true counts."""
    n, operator = _dims(operator_of(node)), operator_of(node)
    more = () if n == 1 else (divisor,)
    if x.split.dim < x.dim - n:
        return alone(at, node, x, kernel, list(stride), *_lists(n, padding), ceil, include_pad, *more)
    if len(x.split.cuts) > 1:
        return NotImplemented
    k, plan, (kernels, strides, sides, _) = _plan(x, n, kernel, stride, padding, 1, ceil)
    split, out = Split(x.split.dim, (plan.bounds,)), plan.out(at.axis.index)
    edges = seen_rows(x.split.bounds, at.axis)
    true = true_counts(out, x.whole[split.dim], kernels[k], strides[k], sides[k], include_pad, edges)
    rows, sides[k] = rows_of(at, x, plan.wanted), 0
    shape = local_shape(at, node, split)
    made = own(at, operator, shape, rows, kernels, strides, sides, ceil, include_pad, *more)
    if divisor is None and any(count != kernels[k] for count in true):
        made = at.call(scaled, made, split.dim, tuple(kernels[k] / count for count in true))
    return at.value(made, split)


def _lists(n: int, *given: Any) -> list[list[int]]:
    return [list(each(g, n)) for g in given]


def _dims(operator: Any) -> int:
    """Spatial dims, by the operator's name: max_pool2d has two."""
    return int(next(c for c in operator._schema.name if c in "123"))


def _plan(
    x: Value, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> tuple[int, Slide, tuple[list[int], list[int], list[int], list[int]]]:
    """Which spatial dim is split, how the kernel slides along it, and the geometry of all of them."""
    kernels: Sequence[int] = each(kernel, n)
    strides, sides, steps = strides_of(kernels, stride), list(each(padding, n)), each(dilation, n)
    k = x.split.dim - (x.dim - n)
    plan = slide(x.split.bounds, kernels[k], strides[k], sides[k], sides[k], steps[k], ceil)
    return k, plan, (list(kernels), list(strides), sides, list(steps))
