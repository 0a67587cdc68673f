"""Interpolates the time of a kernel between measured shapes.

The interpolated quantity is the time over the roofline of its operations and bytes. It changes slowly with the
logarithms of the sizes, so a plane is fitted to it through the nearest measured shapes. It is clipped to their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..clusters import DeviceSpec, ShapeTimes
from ..theory.roofline import BYTES_PER_VALUE

# Tuning constants. They have no unit unless stated.

NEAREST = 12
"""Measured shapes that a plane is fitted to. More: smoother, less local."""

RIDGE = 0.05
"""Ridge penalty on the slopes of a plane, relative to the largest weight. Higher: flatter planes."""

CHANNEL_BLOCK = 16
"""Channels in a vector register of a CPU: convolutions pad their channels to multiples of it."""

STRIDE_DISTANCE, GROUP_DISTANCE = 3.0, 30.0
"""On a CPU, strided convolutions are other kernels than plain ones, and grouped ones are not comparable: factors on
their distance from the others."""

UNALIGNED_MATMUL, ALIGNED = "matmul_odd", 8
"""16-bit matmuls with a size that is not a multiple of the second are another kind of kernel, and much slower."""

ROW_SUMS = "reduce_rows"
"""Sums of rows, among operators of the kind `reduce`: their speed depends on the width of the rows."""

GROUP_NORM = "group_norm"
"""Group norms, among operators of the kind `norm`: their rows are few and wide, and each has one block of threads."""

SIMILAR_DTYPES = {"fp16": "bf16", "tf32": "fp32"}
"""The type whose shapes are used for one that was not measured. Recurrent layers of a GPU, which are bound by latency,
are measured in tf32 and used for fp32 as well."""

Amount = tuple[float, float]
"""Operations, and the least number of values read and written."""


def _matmul(shape: Sequence[float]) -> Amount:
    b, m, n, k = shape
    return 2 * b * m * n * k, b * (m * k + k * n + m * n)


def _conv(shape: Sequence[float]) -> Amount:
    samples, cin, cout, places, window, stride, groups, *_ = shape
    work = 2 * samples * places * groups * cin * cout * window
    return work, samples * groups * places * (cin * stride**2 + cout) + groups * cin * cout * window


def _attention(shape: Sequence[float]) -> Amount:
    heads, queries, keys, width, part = shape
    return 4 * heads * queries * keys * width / part, heads * width * (2 * queries + 2 * keys)


def _recurrent(shape: Sequence[float]) -> Amount:
    steps, samples, width, state, *_ = shape
    matrices = 4 * state * (width + state)
    return 2 * steps * samples * matrices, steps * samples * (width + state) + matrices


def _batch_norm(shape: Sequence[float]) -> Amount:
    values = math.prod(shape)
    return values, 2 * values


def _norm(shape: Sequence[float]) -> Amount:
    values = shape[0] * shape[1]
    return values, 2 * values


def _sum(shape: Sequence[float]) -> Amount:
    values = shape[0] * shape[1]
    return values, values


def _backward(amount: Callable[[Sequence[float]], Amount], times: float) -> Callable[[Sequence[float]], Amount]:
    def backward(shape: Sequence[float]) -> Amount:
        work, values = amount(shape)
        return times * work, 2 * values

    return backward


_AMOUNTS: dict[str, Callable[[Sequence[float]], Amount]] = {
    "matmul": _matmul,
    UNALIGNED_MATMUL: _matmul,
    "conv": _conv,
    "conv_backward": _backward(_conv, 2.0),
    "attention": _attention,
    "attention_backward": _backward(_attention, 2.5),
    "recurrent": _recurrent,
    "recurrent_backward": _backward(_recurrent, 2.0),
    "batch_norm": _batch_norm,
    "batch_norm_backward": _backward(_batch_norm, 1.0),
    "norm": _norm,
    "norm_backward": _backward(_norm, 1.0),
    GROUP_NORM: _norm,
    f"{GROUP_NORM}_backward": _backward(_norm, 1.0),
    ROW_SUMS: _sum,
}


def _coordinates(kind: str, shapes: Any, stride_distance: float = 1.0) -> Any:
    """Coordinates in which shapes with similar kernels are near. Of a convolution, samples and places count as one.

    `stride_distance` is the distance between strides, relative to other sizes; 1 on a GPU.
    """
    import numpy as np

    logs = np.log(np.array(shapes, dtype=float))
    if kind in ("conv", "conv_backward"):
        rows = logs[..., :1] + logs[..., 3:4]
        grouped = (GROUP_DISTANCE if stride_distance != 1 else 0.0) * (logs[..., 6:7] > 0)
        steps = [stride_distance * logs[..., 5:6], logs[..., 6:7], grouped]
        logs = np.concatenate([rows, logs[..., 1:3], logs[..., 4:5], *steps, 4 * logs[..., 7:]], axis=-1)
    return logs


def _padded(shape: Sequence[float]) -> Sequence[float]:
    """A convolution as a CPU computes it: channels are padded to whole blocks."""
    samples, cin, cout, *rest = shape
    return (
        samples,
        *(c if c < CHANNEL_BLOCK else CHANNEL_BLOCK * math.ceil(c / CHANNEL_BLOCK) for c in (cin, cout)),
        *rest,
    )


def kernel_work(kind: str, shape: Sequence[float]) -> float:
    """Operations of one call; of norms, the values that they normalise."""
    return _AMOUNTS[kind](shape)[0]


def kernel_values(kind: str, shape: Sequence[float]) -> float:
    """The least number of values that one call reads and writes."""
    return _AMOUNTS[kind](shape)[1]


class ShapeInterpolation:
    """Kernel times of one device, interpolated between its measured shapes."""

    def __init__(self, device: DeviceSpec) -> None:
        self._device = device
        self._tables = {(t.kernel, t.dtype): t for t in device.shape_times if t.kernel in _AMOUNTS}
        self._stride_distance = STRIDE_DISTANCE if device.kind == "cpu" else 1.0
        self._points_of: dict[tuple[str, str], Any] = {}
        self._seconds: dict[tuple[Any, ...], float] = {}

    def seconds(self, kind: str, dtype: str, shape: tuple[float, ...]) -> float | None:
        """One call at a shape; None where the kind was not measured in that type."""
        if (
            kind == "matmul"
            and any(round(size) % ALIGNED for size in shape[1:])
            and (UNALIGNED_MATMUL, dtype) in self._tables
        ):
            kind = UNALIGNED_MATMUL
        similar = "tf32" if dtype == "fp32" and kind.startswith("recurrent") else SIMILAR_DTYPES.get(dtype, dtype)
        table = self._tables.get((kind, dtype)) or self._tables.get((kind, similar))
        if table is None or len(table.shapes[0]) != len(shape) or min(shape) <= 0:
            return None
        key = (kind, dtype, shape)
        if key not in self._seconds:
            self._seconds[key] = self._ideal(kind, table.dtype, shape) * math.exp(self._log_ratio(table, shape))
        return self._seconds[key]

    def _ideal(self, kind: str, dtype: str, shape: Sequence[float]) -> float:
        """The roofline. A CPU starts, fetches and computes one after the other, so its times add up."""
        on_cpu = self._device.kind == "cpu"
        work, values = _AMOUNTS[kind](_padded(shape) if on_cpu and kind.startswith("conv") else shape)
        peak = self._device.peak.get(dtype) or max(self._device.peak.values())
        computing, moving = work / peak, values * BYTES_PER_VALUE.get(dtype, 4) / self._device.bandwidth
        if on_cpu:
            return self._device.launch + computing + moving
        return max(computing, moving)

    def _log_ratio(self, table: ShapeTimes, shape: tuple[float, ...]) -> float:
        """The logarithm of time over roofline, by a plane through the nearest shapes, weighted by distance."""
        import numpy as np

        points, logs = self._points(table)
        away = points - _coordinates(table.kernel, shape, self._stride_distance)
        square = (away**2).sum(1)
        near = np.argsort(square)[:NEAREST]
        weight = 1 / (square[near] + 0.05) ** 2
        rows = np.column_stack([np.ones(len(near)), away[near]])
        penalty = np.diag([0.0, *[RIDGE * weight.max()] * points.shape[1]])
        matrix = rows.T @ (rows * weight[:, None]) + penalty
        answer = np.linalg.solve(matrix, rows.T @ (weight * logs[near]))[0]
        return float(np.clip(answer, logs[near].min(), logs[near].max()))

    def _points(self, table: ShapeTimes) -> Any:
        """(coordinates, logarithm of time over roofline) of every measured shape."""
        import numpy as np

        key = (table.kernel, table.dtype)
        if key not in self._points_of:
            ideal = [self._ideal(table.kernel, table.dtype, s) for s in table.shapes]
            shares = np.log(np.array(table.seconds) / np.array(ideal))
            self._points_of[key] = _coordinates(table.kernel, table.shapes, self._stride_distance), shares
        return self._points_of[key]
