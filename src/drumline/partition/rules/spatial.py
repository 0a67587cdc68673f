"""Images along their rows: pools to a size, padding, interpolation, pixel shuffling. Each becomes a window that brings
the rows of others, a piece that works along the split dim, and the operator itself for the other dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import moves
from ..layout import Split
from ..spatial.pad import padding as padding_plan
from ..spatial.pieces import Sampling, averaged, picked, sampled
from ..spatial.pool import adaptive, highest_of_all, parts
from ..spatial.resize import around, inside, reach, resized_bounds, sampling, whole_factor
from ..spatial.slide import settled
from ..spread import Pass, rule
from ..values import Value
from ..window import windows
from .local import alone, local_shape, operator_of, own, reads_places, rows_of, scaled_cuts, with_places

aten = torch.ops.aten


def _one_segment(x: Value) -> bool:
    return len(x.split.cuts) == 1


# -- to a given size


_TO_AVERAGE = (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
_TO_MAX = (aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)


@rule(*_TO_AVERAGE)
def adaptive_avg_pool(at: Pass, node: Node, x: Value, size: Sequence[int]) -> Any:
    """The parts along the split dim are averaged first, those of the other dims as they are."""
    n, dim = len(size), x.split.dim
    k = dim - (x.dim - n)
    if k < 0:
        return alone(at, node, x, list(size))
    if not _one_segment(x):
        return NotImplemented
    operator, whole = operator_of(node), x.whole[dim]
    if size[k] == 1:
        total = at.call(moves.reduce, at.call(aten.sum.dim_IntList, x, [dim], True), at.axis)
        mean = at.call(aten.div.Tensor, total, whole)
        return at.value(own(at, operator, node.meta["val"].shape, mean, list(size)), None)
    plan = adaptive(x.split.bounds, size[k])
    split, start = Split(dim, (plan.bounds,)), plan.wanted[at.axis.index][0]
    spans = tuple((a - start, b - start) for a, b in parts(plan.out(at.axis.index), whole, size[k]))
    rows = at.call(averaged, rows_of(at, x, plan.wanted, axis=at.axis.with_halo), dim, spans)
    shape = local_shape(at, node, split)
    if list(rows.meta["val"].shape) == shape:
        return at.value(rows, split)
    return at.value(own(at, operator, shape, rows, shape[x.dim - n :]), split)


@rule(*_TO_MAX)
def adaptive_max_pool(at: Pass, node: Node, x: Value, size: Sequence[int]) -> Any:
    """To one row, without the places of the maxima."""
    n = len(size)
    k = x.split.dim - (x.dim - n)
    if k < 0:
        return with_places(at, node, x, list(size))
    if not _one_segment(x) or size[k] != 1 or reads_places(node):
        return NotImplemented
    made = at.call(highest_of_all, x, list(size), x.split.dim, x.split.bounds, at.axis)
    return [Value(made, None, node.meta["val"][0].shape)]


@rule(highest_of_all)
def highest(at: Pass, node: Node, x: Value, size: Sequence[int], *args: Any) -> Any:
    """Samples and channels, each rank its own."""
    if x.split.dim >= x.dim - len(size) or not x.fake.numel():
        return NotImplemented
    return at.value(at.call(node.target, x, size, *args), x.layout)


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
    at: Pass, node: Node, x: Value, sides: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    """In every mode; sides are given last dim first. Negative ones crop."""
    sides, k = list(sides), 2 * (x.dim - 1 - x.split.dim)
    if k >= len(sides) or not any(sides[k : k + 2]):
        return alone(at, node, x, sides, mode, value)
    if not _one_segment(x):
        return NotImplemented
    plan = padding_plan(x.split.bounds, sides[k], sides[k + 1], mode)
    split = Split(x.split.dim, (plan.bounds,))
    rows = at.call(windows, x, x.split.dim, x.split.bounds, plan.wanted, at.axis.with_halo, value or 0.0)
    order = plan.order[at.axis.index]
    if order:
        rows = at.call(picked, rows, x.split.dim, order)
    sides[k] = sides[k + 1] = 0
    if any(sides):
        rows = own(at, aten.pad.default, local_shape(at, node, split), rows, sides, mode, value)
    return at.value(rows, split)


@rule(*_PADS)
def pad_in_mode(at: Pass, node: Node, x: Value, sides: Sequence[int]) -> Any:
    """The same, by another name."""
    k = 2 * (x.dim - 1 - x.split.dim)
    if k >= len(sides):
        return alone(at, node, x, list(sides))
    return pad(at, node, x, sides, _PADS[operator_of(node)])


@rule(aten.constant_pad_nd.default)
def constant_pad(at: Pass, node: Node, x: Value, sides: Sequence[int], value: float = 0.0) -> Any:
    """The same, by another name."""
    k = 2 * (x.dim - 1 - x.split.dim)
    if k >= len(sides) or not any(sides[k : k + 2]):
        return at.value(at.call(aten.constant_pad_nd.default, x, list(sides), value), x.layout)
    return pad(at, node, x, sides, "constant", float(value))


# -- pixels and channels


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(at: Pass, node: Node, x: Value, factor: int) -> Any:
    """Channels become rows and columns: everything stays where it is."""
    behind = x.dim - 1 - x.split.dim
    times, over = (factor, 1) if behind < 2 else (1, factor**2) if behind == 2 else (1, 1)
    split = scaled_cuts(x.split, times, over, x.split.dim)
    if split is None or (behind < 2 and not _one_segment(x)):
        return NotImplemented
    return at.value(own(at, operator_of(node), local_shape(at, node, split), x, factor), split)


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(at: Pass, node: Node, x: Value, factor: int) -> Any:
    """Rows and columns become channels: rows that belong together come to one rank."""
    dim, behind = x.split.dim, x.dim - 1 - x.split.dim
    if behind < 2:
        if not _one_segment(x):
            return NotImplemented
        out = settled(((2 * b + factor) // (2 * factor) for b in x.split.bounds), x.whole[dim] // factor)
        x = at.split(x, Split(dim, (tuple(b * factor for b in out),)))
        split = Split(dim, (out,))
    else:
        made = scaled_cuts(x.split, factor**2 if behind == 2 else 1, 1, dim)
        assert made is not None
        split = made
    return at.value(own(at, operator_of(node), local_shape(at, node, split), x, factor), split)


@rule(aten.channel_shuffle.default)
def channel_shuffle(at: Pass, node: Node, x: Value, groups: int) -> Any:
    """Not where the channels are split."""
    return NotImplemented if x.split.dim == 1 else alone(at, node, x, groups)


@rule(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(at: Pass, node: Node, x: Value, grid: Value, *args: Any) -> Any:
    """By samples; by channels; by the points that are asked for, of an image that every rank has."""
    if x.layout is not None and x.layout.dim > 1:
        return NotImplemented
    if x.layout is not None and x.layout.dim == 1:
        split, image, points = x.layout, x, at.whole(grid, enter=True)
    elif (x.layout or grid.split).dim == 0:
        split = x.layout or grid.split
        image, points = at.split(x, split), at.split(grid, split)
    elif grid.split.dim < grid.dim - 1:
        split, image, points = grid.split.at(grid.split.dim + 1), at.whole(x, enter=True), grid
    else:
        return NotImplemented
    return at.value(own(at, operator_of(node), local_shape(at, node, split), image, points, *args), split)


# -- interpolation

_RESIZES: dict[Any, tuple[str, int]] = {
    aten.upsample_nearest1d: ("nearest", 1),
    aten.upsample_nearest2d: ("nearest", 2),
    aten.upsample_nearest3d: ("nearest", 3),
    aten._upsample_nearest_exact1d: ("nearest-exact", 1),
    aten._upsample_nearest_exact2d: ("nearest-exact", 2),
    aten._upsample_nearest_exact3d: ("nearest-exact", 3),
    aten.upsample_linear1d: ("linear", 1),
    aten.upsample_bilinear2d: ("linear", 2),
    aten.upsample_trilinear3d: ("linear", 3),
    aten.upsample_bicubic2d: ("cubic", 2),
}


@rule(*(packet.vec for packet in _RESIZES), *(packet.default for packet in _RESIZES))
def resize(at: Pass, node: Node, x: Value, size: Sequence[int] | None, *args: Any) -> Any:
    """Along the split dim by weighted sums of rows, along the others by the operator itself."""
    operator = operator_of(node)
    mode, n = _RESIZES[operator.overloadpacket]
    flat = mode.startswith("nearest")
    align = () if flat else (args[0],)
    given = args[0 if flat else 1 :]
    if operator._overloadname == "vec":
        scales = [None] * n if not given or given[0] is None else list(given[0])
    else:
        scales = [*given, *([None] * (n - len(given)))]
    if x.split.dim < 2:
        size = list(node.meta["val"].shape[2:])
        shape = local_shape(at, node, x.split)
        return at.value(own(at, operator.overloadpacket.default, shape, x, size, *align, *scales), x.layout)
    if not _one_segment(x):
        return NotImplemented
    k, count = x.split.dim - 2, node.meta["val"].shape[x.split.dim]
    factor = whole_factor(mode, x.split.bounds, count, bool(align and align[0]), scales[k])
    if factor:
        return _enlarged(at, node, x, mode, align, scales, factor)
    split, rows = _resampled(at, x, mode, n, count, bool(align and align[0]), scales[k])
    scales[k] = None
    shape = local_shape(at, node, split)
    if list(rows.meta["val"].shape) == shape and all(s is None or s == 1.0 for s in scales):
        return at.value(rows, split)
    return at.value(own(at, operator.overloadpacket.default, shape, rows, shape[2:], *align, *scales), split)


def _enlarged(
    at: Pass, node: Node, x: Value, mode: str, align: tuple[bool, ...], scales: list[float | None], factor: int
) -> Any:
    """All dims at once by the operator itself, on a part with a halo that is cut off again."""
    dim, bounds = x.split.dim, x.split.bounds
    wanted = around(mode, bounds, at.axis)
    rows = rows_of(at, x, wanted)
    split = Split(dim, (tuple(b * factor for b in bounds),))
    shape = local_shape(at, node, split)
    shape[dim] = rows.meta["val"].shape[dim] * factor
    scales[dim - 2] = None
    made = own(at, operator_of(node).overloadpacket.default, shape, rows, shape[2:], *align, *scales)
    start = (bounds[at.axis.index] - wanted[at.axis.index][0]) * factor
    length = split.length(at.axis.index)
    if length != shape[dim]:
        made = at.call(aten.slice.Tensor, made, dim, start, start + length)
    return at.value(made, split)


def _resampled(
    at: Pass, x: Value, mode: str, n: int, count: int, align: bool, scale: float | None
) -> tuple[Split, Node]:
    """The rows of this rank's part of `count` rows."""
    dim, bounds = x.split.dim, x.split.bounds
    taps = sampling(mode, n, bounds[-1], count, align, None if align else scale, x.fake.dtype == torch.float64)
    out = resized_bounds(bounds, count)
    taps = taps if at.axis.halo else inside(taps, out, bounds)
    wanted = tuple(reach(taps, out[r], out[r + 1]) for r in range(at.axis.size))
    mine = Sampling(taps[out[at.axis.index] : out[at.axis.index + 1]], wanted[at.axis.index][0])
    return Split(dim, (out,)), at.call(sampled, rows_of(at, x, wanted), dim, mine)
