"""Images along their rows: adaptive pooling, padding, interpolation, pixel shuffling. Each becomes a window that
fetches the rows of other ranks, an operation along the split dim, and the operator itself for the other dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...torchkit.operators import upsample_nearest_exact
from ...torchkit.schemas import overload_name
from ..sharding import redistribution
from ..sharding.halo_exchange import windows
from ..sharding.layout import ShardedValue, Split
from ..sharding_pass import ShardingPass, rule
from ..spatial.pad import plan_padding as padding_plan
from ..spatial.pool import adaptive, global_max_pool, parts
from ..spatial.resize import clamped_taps, needed_rows, resized_bounds, rows_with_halo, sampling, whole_factor
from ..spatial.rows import Sampling, average_rows, feasible_bounds, pick_rows, sample_rows
from .common import (
    call_on_part,
    local_shape,
    operator_of,
    part_by_part,
    reads_indices,
    rows_of,
    scaled_cuts,
    with_indices,
)

aten = torch.ops.aten


def _one_segment(x: ShardedValue) -> bool:
    return len(x.split.cuts) == 1


# -- adaptive pooling


_TO_AVERAGE = (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
_TO_MAX = (aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)


@rule(*_TO_AVERAGE)
def adaptive_avg_pool(ctx: ShardingPass, node: Node, x: ShardedValue, size: Sequence[int]) -> Any:
    """Average along the split dim first, then along the other dims."""
    n, dim = len(size), x.split.dim
    k = dim - (x.dim - n)
    if k < 0:
        return part_by_part(ctx, node, x, list(size))
    if not _one_segment(x):
        return NotImplemented
    operator, whole = operator_of(node), x.whole[dim]
    if size[k] == 1:
        total = ctx.call(redistribution.reduce_partial, ctx.call(aten.sum.dim_IntList, x, [dim], True), ctx.axis)
        mean = ctx.call(aten.div.Tensor, total, whole)
        return ctx.value(call_on_part(ctx, operator, node.meta["val"].shape, mean, list(size)), None)
    plan = adaptive(x.split.bounds, size[k])
    split, start = Split(dim, (plan.bounds,)), plan.wanted[ctx.axis.index][0]
    spans = tuple((a - start, b - start) for a, b in parts(plan.out(ctx.axis.index), whole, size[k]))
    rows = ctx.call(average_rows, rows_of(ctx, x, plan.wanted, axis=ctx.axis.with_halo), dim, spans)
    shape = local_shape(ctx, node, split)
    if list(rows.meta["val"].shape) == shape:
        return ctx.value(rows, split)
    return ctx.value(call_on_part(ctx, operator, shape, rows, shape[x.dim - n :]), split)


@rule(*_TO_MAX)
def adaptive_max_pool(ctx: ShardingPass, node: Node, x: ShardedValue, size: Sequence[int]) -> Any:
    """To one row, without the indices of the maxima."""
    n = len(size)
    k = x.split.dim - (x.dim - n)
    if k < 0:
        return with_indices(ctx, node, x, list(size))
    if not _one_segment(x) or size[k] != 1 or reads_indices(node):
        return NotImplemented
    result = ctx.call(global_max_pool, x, list(size), x.split.dim, x.split.bounds, ctx.axis)
    return [ShardedValue(result, None, node.meta["val"][0].shape)]


@rule(global_max_pool)
def highest(ctx: ShardingPass, node: Node, x: ShardedValue, size: Sequence[int], *args: Any) -> Any:
    """By samples and channels, each rank its own."""
    if x.split.dim >= x.dim - len(size) or not x.fake.numel():
        return NotImplemented
    return ctx.value(ctx.call(node.target, x, size, *args), x.layout)


# -- padding

_PADS: dict[Any, str] = {
    aten.reflection_pad1d.default: "reflect",
    aten.reflection_pad2d.default: "reflect",
    aten.reflection_pad3d.default: "reflect",
    aten.replication_pad1d.default: "replicate",
    aten.replication_pad2d.default: "replicate",
    aten.replication_pad3d.default: "replicate",
}


@rule(aten.pad.default)
def pad(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    sides: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    """In every mode; sides are arguments last dim first. Negative ones crop."""
    sides, k = list(sides), 2 * (x.dim - 1 - x.split.dim)
    if k >= len(sides) or not any(sides[k : k + 2]):
        return part_by_part(ctx, node, x, sides, mode, value)
    if not _one_segment(x):
        return NotImplemented
    plan = padding_plan(x.split.bounds, sides[k], sides[k + 1], mode)
    split = Split(x.split.dim, (plan.bounds,))
    rows = ctx.call(windows, x, x.split.dim, x.split.bounds, plan.wanted, ctx.axis.with_halo, value or 0.0)
    order = plan.order[ctx.axis.index]
    if order:
        rows = ctx.call(pick_rows, rows, x.split.dim, order)
    sides[k] = sides[k + 1] = 0
    if any(sides):
        rows = call_on_part(ctx, aten.pad.default, local_shape(ctx, node, split), rows, sides, mode, value)
    return ctx.value(rows, split)


@rule(*_PADS)
def pad_in_mode(ctx: ShardingPass, node: Node, x: ShardedValue, sides: Sequence[int]) -> Any:
    """The same, by another name."""
    k = 2 * (x.dim - 1 - x.split.dim)
    if k >= len(sides):
        return part_by_part(ctx, node, x, list(sides))
    return pad(ctx, node, x, sides, _PADS[operator_of(node)])


@rule(aten.constant_pad_nd.default)
def constant_pad(ctx: ShardingPass, node: Node, x: ShardedValue, sides: Sequence[int], value: float = 0.0) -> Any:
    """The same, by another name."""
    k = 2 * (x.dim - 1 - x.split.dim)
    if k >= len(sides) or not any(sides[k : k + 2]):
        return ctx.value(ctx.call(aten.constant_pad_nd.default, x, list(sides), value), x.layout)
    return pad(ctx, node, x, sides, "constant", float(value))


# -- pixels and channels


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(ctx: ShardingPass, node: Node, x: ShardedValue, factor: int) -> Any:
    """Channels become rows and columns: nothing is sent."""
    from_end = x.dim - 1 - x.split.dim
    times, over = (factor, 1) if from_end < 2 else (1, factor**2) if from_end == 2 else (1, 1)
    split = scaled_cuts(x.split, times, over, x.split.dim)
    if split is None or (from_end < 2 and not _one_segment(x)):
        return NotImplemented
    return ctx.value(call_on_part(ctx, operator_of(node), local_shape(ctx, node, split), x, factor), split)


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(ctx: ShardingPass, node: Node, x: ShardedValue, factor: int) -> Any:
    """Rows and columns become channels: rows that belong together move to one rank."""
    dim, from_end = x.split.dim, x.dim - 1 - x.split.dim
    if from_end < 2:
        if not _one_segment(x):
            return NotImplemented
        out = feasible_bounds(((2 * b + factor) // (2 * factor) for b in x.split.bounds), x.whole[dim] // factor)
        x = ctx.split(x, Split(dim, (tuple(b * factor for b in out),)))
        split = Split(dim, (out,))
    else:
        result = scaled_cuts(x.split, factor**2 if from_end == 2 else 1, 1, dim)
        assert result is not None
        split = result
    return ctx.value(call_on_part(ctx, operator_of(node), local_shape(ctx, node, split), x, factor), split)


@rule(aten.channel_shuffle.default)
def channel_shuffle(ctx: ShardingPass, node: Node, x: ShardedValue, groups: int) -> Any:
    """Not where the channels are split."""
    return NotImplemented if x.split.dim == 1 else part_by_part(ctx, node, x, groups)


@rule(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(ctx: ShardingPass, node: Node, x: ShardedValue, grid: ShardedValue, *args: Any) -> Any:
    """By samples, by channels, or by the sampled points of an image that every rank has."""
    if x.layout is not None and x.layout.dim > 1:
        return NotImplemented
    if x.layout is not None and x.layout.dim == 1:
        split, image, points = x.layout, x, ctx.whole(grid, enter=True)
    elif (x.layout or grid.split).dim == 0:
        split = x.layout or grid.split
        image, points = ctx.split(x, split), ctx.split(grid, split)
    elif grid.split.dim < grid.dim - 1:
        split, image, points = grid.split.along(grid.split.dim + 1), ctx.whole(x, enter=True), grid
    else:
        return NotImplemented
    return ctx.value(call_on_part(ctx, operator_of(node), local_shape(ctx, node, split), image, points, *args), split)


# -- interpolation

_RESIZES: dict[Any, tuple[str, int]] = {
    aten.upsample_nearest1d: ("nearest", 1),
    aten.upsample_nearest2d: ("nearest", 2),
    aten.upsample_nearest3d: ("nearest", 3),
    upsample_nearest_exact[1]: ("nearest-exact", 1),
    upsample_nearest_exact[2]: ("nearest-exact", 2),
    upsample_nearest_exact[3]: ("nearest-exact", 3),
    aten.upsample_linear1d: ("linear", 1),
    aten.upsample_bilinear2d: ("linear", 2),
    aten.upsample_trilinear3d: ("linear", 3),
    aten.upsample_bicubic2d: ("cubic", 2),
}


@rule(*(packet.vec for packet in _RESIZES), *(packet.default for packet in _RESIZES))
def resize(ctx: ShardingPass, node: Node, x: ShardedValue, size: Sequence[int] | None, *args: Any) -> Any:
    """Along the split dim by weighted sums of rows, along the others by the operator itself."""
    operator = operator_of(node)
    mode, n = _RESIZES[operator.overloadpacket]
    flat = mode.startswith("nearest")
    align = () if flat else (args[0],)
    arguments = args[0 if flat else 1 :]
    if overload_name(operator) == "vec":
        scales = [None] * n if not arguments or arguments[0] is None else list(arguments[0])
    else:
        scales = [*arguments, *([None] * (n - len(arguments)))]
    if x.split.dim < 2:
        size = list(node.meta["val"].shape[2:])
        shape = local_shape(ctx, node, x.split)
        return ctx.value(call_on_part(ctx, operator.overloadpacket.default, shape, x, size, *align, *scales), x.layout)
    if not _one_segment(x):
        return NotImplemented
    k, count = x.split.dim - 2, node.meta["val"].shape[x.split.dim]
    factor = whole_factor(mode, x.split.bounds, count, bool(align and align[0]), scales[k])
    if factor:
        return _enlarged(ctx, node, x, mode, align, scales, factor)
    split, rows = _resampled(ctx, x, mode, n, count, bool(align and align[0]), scales[k])
    scales[k] = None
    shape = local_shape(ctx, node, split)
    if list(rows.meta["val"].shape) == shape and all(s is None or s == 1.0 for s in scales):
        return ctx.value(rows, split)
    return ctx.value(call_on_part(ctx, operator.overloadpacket.default, shape, rows, shape[2:], *align, *scales), split)


def _enlarged(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    mode: str,
    align: tuple[bool, ...],
    scales: list[float | None],
    factor: int,
) -> Any:
    """All dims at once by the operator itself, on a part with a halo that is cut off again."""
    dim, bounds = x.split.dim, x.split.bounds
    wanted = rows_with_halo(mode, bounds, ctx.axis)
    rows = rows_of(ctx, x, wanted)
    split = Split(dim, (tuple(b * factor for b in bounds),))
    shape = local_shape(ctx, node, split)
    shape[dim] = rows.meta["val"].shape[dim] * factor
    scales[dim - 2] = None
    result = call_on_part(ctx, operator_of(node).overloadpacket.default, shape, rows, shape[2:], *align, *scales)
    start = (bounds[ctx.axis.index] - wanted[ctx.axis.index][0]) * factor
    length = split.length(ctx.axis.index)
    if length != shape[dim]:
        result = ctx.call(aten.slice.Tensor, result, dim, start, start + length)
    return ctx.value(result, split)


def _resampled(
    ctx: ShardingPass, x: ShardedValue, mode: str, n: int, count: int, align: bool, scale: float | None
) -> tuple[Split, Node]:
    """The rows of this rank's part of `count` rows."""
    dim, bounds = x.split.dim, x.split.bounds
    taps = sampling(mode, n, bounds[-1], count, align, None if align else scale, x.fake.dtype == torch.float64)
    out = resized_bounds(bounds, count)
    taps = taps if ctx.axis.halo else clamped_taps(taps, out, bounds)
    wanted = tuple(needed_rows(taps, out[r], out[r + 1]) for r in range(ctx.axis.size))
    mine = Sampling(taps[out[ctx.axis.index] : out[ctx.axis.index + 1]], wanted[ctx.axis.index][0])
    return Split(dim, (out,)), ctx.call(sample_rows, rows_of(ctx, x, wanted), dim, mine)
