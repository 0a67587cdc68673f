"""Interpolation and pixel shuffling along a split dim: nearest, linear and cubic, to a size or by a scale.

All are separable: the split dim is resampled here, from a window and in global coordinates; the other dims by torch's
operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ...torchkit.fake_tensors import unset_fake_temporarily
from ...torchkit.operators import upsample_nearest_exact
from ..sharding.halo_exchange import Span, rebalance, window
from ..sharding.layout import Bounds
from ..sharding.redistribution import Axis
from .rows import Taps, feasible_bounds, spans, weighted_rows, zeros_from

_aten = torch.ops.aten
_OPERATORS: dict[tuple[str, int], Callable[..., Any]] = {
    ("nearest", 1): _aten.upsample_nearest1d,
    ("nearest", 2): _aten.upsample_nearest2d,
    ("nearest", 3): _aten.upsample_nearest3d,
    ("nearest-exact", 1): upsample_nearest_exact[1],
    ("nearest-exact", 2): upsample_nearest_exact[2],
    ("nearest-exact", 3): upsample_nearest_exact[3],
    ("linear", 1): _aten.upsample_linear1d,
    ("linear", 2): _aten.upsample_bilinear2d,
    ("linear", 3): _aten.upsample_trilinear3d,
    ("cubic", 2): _aten.upsample_bicubic2d,
}
_CUBIC = -0.75
"""The free coefficient of the cubic kernel, as in torch."""


def resize(
    x: torch.Tensor,
    size: Sequence[int],
    mode: str,
    align: bool,
    scales: Sequence[float | None],
    dim: int,
    bounds: Bounds,
    axis: Axis,
) -> tuple[torch.Tensor, Bounds]:
    """This rank's rows of the interpolated image, and their bounds.

    `size` is the whole output's; `scales` are the user's factors or None, per spatial dim. `mode` is nearest,
    nearest-exact, linear or cubic, in any number of dims.
    """
    n, dim = len(size), dim % x.dim()
    at = dim - (x.dim() - n)
    factor = whole_factor(mode, bounds, size[at], align, scales[at])
    if factor:
        return _enlarged(x, size, mode, scales, at, dim, bounds, axis, factor)
    axis_scale = None if align else scales[at]
    out = resized_bounds(bounds, size[at])
    taps = sampling(mode, n, bounds[-1], size[at], align, axis_scale, x.dtype == torch.float64)
    taps = taps if axis.halo else clamped_taps(taps, out, bounds)
    wanted = tuple(needed_rows(taps, a, b) for a, b in spans(out))
    rows = window(x, dim, bounds, wanted, axis)
    a, b = out[axis.index], out[axis.index + 1]
    if a == b:
        return zeros_from([*x.shape[: x.dim() - n], *size[:at], 0, *size[at + 1 :]], rows), out
    rows = weighted_rows(rows, taps[a:b], wanted[axis.index][0], dim)
    return _resize_other_dims(rows, size, mode, align, scales, at), out


def whole_factor(mode: str, bounds: Bounds, count: int, align: bool, scale: float | None) -> int:
    """The integer factor of an enlargement that torch computes alike on a part; else 0."""
    factor = count // bounds[-1]
    if align or factor * bounds[-1] != count or scale not in (None, float(factor)):
        return 0
    if any(a == b for a, b in spans(bounds)):
        return 0
    exact = factor & (factor - 1) == 0  # for other factors torch rounds by position
    return factor if exact or not mode.startswith("nearest") else 0


def rows_with_halo(mode: str, bounds: Bounds, axis: Axis) -> tuple[Span, ...]:
    """The rows of each rank, and the neighbours that its enlarged rows depend on."""
    halo = {"linear": 1, "cubic": 2}.get(mode, 0) if axis.halo else 0
    return tuple((max(a - halo, 0), min(b + halo, bounds[-1])) for a, b in spans(bounds))


def _enlarged(
    x: torch.Tensor,
    size: Sequence[int],
    mode: str,
    scales: Sequence[float | None],
    at: int,
    dim: int,
    bounds: Bounds,
    axis: Axis,
    factor: int,
) -> tuple[torch.Tensor, Bounds]:
    """All dims at once by torch's operator, on a part with a halo that is cut off again."""
    n, wanted = len(size), rows_with_halo(mode, bounds, axis)
    rows = window(x, dim, bounds, wanted, axis)
    target = [rows.shape[dim] * factor if i == at else size[i] for i in range(n)]
    arguments = () if mode.startswith("nearest") else (False,)
    rest = [None if i == at else scales[i] for i in range(n)]
    out: torch.Tensor = _OPERATORS[mode, n](rows, target, *arguments, *rest)
    start, stop = bounds[axis.index], bounds[axis.index + 1]
    new = tuple(b * factor for b in bounds)
    return out.narrow(dim, (start - wanted[axis.index][0]) * factor, (stop - start) * factor), new


def pixel_shuffle(x: torch.Tensor, factor: int, dim: int, bounds: Bounds, axis: Axis) -> tuple[torch.Tensor, Bounds]:
    """Every row becomes `factor` rows: nothing is sent."""
    out = tuple(b * factor for b in bounds)
    if x.numel() == 0:  # torch has no backward for zero rows
        *outer, channels, height, width = x.shape
        return zeros_from([*outer, channels // factor**2, height * factor, width * factor], x), out
    return F.pixel_shuffle(x, factor), out


def pixel_unshuffle(x: torch.Tensor, factor: int, dim: int, bounds: Bounds, axis: Axis) -> tuple[torch.Tensor, Bounds]:
    """`factor` rows become one: rows that belong together move to one rank."""
    out = feasible_bounds((_rounded(b, factor) for b in bounds), bounds[-1] // factor)
    rows = rebalance(x, dim, bounds, tuple(b * factor for b in out), axis)
    if rows.numel() == 0:
        *outer, channels, height, width = rows.shape
        return zeros_from([*outer, channels * factor**2, height // factor, width // factor], rows), out
    return F.pixel_unshuffle(rows, factor), out


@lru_cache(maxsize=256)
def sampling(
    mode: str, n: int, size: int, count: int, align: bool, scale: float | None, double: bool
) -> tuple[Taps, ...]:
    """The taps of each of `count` outputs along a dim of `size` rows."""
    if mode.startswith("nearest"):
        return tuple(((row, 1.0),) for row in _nearest(mode, n, size, count, scale, double))
    if align:
        step = (size - 1) / (count - 1) if count > 1 else 0.0
        sources = [step * j for j in range(count)]
    else:
        step = 1.0 / scale if scale else size / count
        sources = [step * (j + 0.5) - 0.5 for j in range(count)]
    return tuple((_linear if mode == "linear" else _cubic)(source, size) for source in sources)


def _nearest(mode: str, n: int, size: int, count: int, scale: float | None, double: bool) -> list[int]:
    """Source rows, from torch itself because of its rounding: the numbers 0, 1, 2, ... are resized as an image."""
    with unset_fake_temporarily(), torch.no_grad():
        numbers = torch.arange(size, dtype=torch.float64 if double else torch.float32)
        image = numbers.view(1, 1, *([1] * (n - 1)), size)
        resized = _OPERATORS[mode, n](image, [*([1] * (n - 1)), count], *([None] * (n - 1)), scale)
        return [int(number) for number in resized.flatten().tolist()]


def _linear(source: float, size: int) -> Taps:
    source = max(source, 0.0)
    row = min(math.floor(source), size - 1)
    part = min(max(source - row, 0.0), 1.0)
    return (row, 1.0 - part), (min(row + 1, size - 1), part)


def _cubic(source: float, size: int) -> Taps:
    row = math.floor(source)
    t = source - row

    def near(d: float) -> float:
        return ((_CUBIC + 2) * d - (_CUBIC + 3)) * d * d + 1

    def far(d: float) -> float:
        return ((_CUBIC * d - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC

    weights = (far(t + 1), near(t), near(1 - t), far(2 - t))
    return tuple((min(max(row - 1 + k, 0), size - 1), weight) for k, weight in enumerate(weights))


def resized_bounds(bounds: Bounds, count: int) -> Bounds:
    """Bounds of the result: each rank has about the same fraction of it as of the source."""
    return feasible_bounds((_rounded(b * count, bounds[-1]) for b in bounds), count)


def clamped_taps(taps: tuple[Taps, ...], out: Bounds, bounds: Bounds) -> tuple[Taps, ...]:
    """Without a halo: each rank's edge rows stand for those beyond them, as at the edge of an image."""
    clamped = list(taps)
    for (a, b), (first, last) in zip(spans(out), spans(bounds), strict=True):
        for o in range(a, b) if first < last else ():
            clamped[o] = tuple((min(max(row, first), last - 1), weight) for row, weight in taps[o])
    return tuple(clamped)


def needed_rows(taps: tuple[Taps, ...], a: int, b: int) -> Span:
    """The rows that outputs [a, b) need; they ascend with the outputs."""
    if a == b:
        return 0, 0
    return min(row for row, _ in taps[a]), max(row for row, _ in taps[b - 1]) + 1


def _resize_other_dims(
    x: torch.Tensor, size: Sequence[int], mode: str, align: bool, scales: Sequence[float | None], at: int
) -> torch.Tensor:
    """Resize the dims that are not split, by torch."""
    n = len(size)
    target = [x.shape[i - n] if i == at else size[i] for i in range(n)]
    rest = [None if i == at else scales[i] for i in range(n)]
    if target == list(x.shape[x.dim() - n :]) and all(s is None or s == 1.0 for s in rest):
        return x
    arguments = () if mode.startswith("nearest") else (align,)
    out: torch.Tensor = _OPERATORS[mode, n](x, target, *arguments, *rest)
    return out


def _rounded(a: int, b: int) -> int:
    """a / b to the nearest integer, halves up."""
    return (2 * a + b) // (2 * b)
