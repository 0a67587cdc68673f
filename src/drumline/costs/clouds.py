"""Seconds of kernels at shapes that were not measured, from those that were.

What is compared between shapes is the share that a kernel reaches of what the device could do: the roofline of its
operations and its bytes. That share changes slowly with the logarithms of the sizes, so that a plane through the
nearest measured shapes tells it. Beyond them it is not continued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..clusters import ShapeTimes, DeviceSpec

NEAREST = 12
"""Measured shapes that a plane is laid through."""

FLAT = 0.05
"""How strongly planes are kept from tilting, where few shapes say how."""

BLOCK = 16
"""Channels that a CPU's vectors hold at once."""
APART, GROUPED = 3.0, 30.0
"""On a CPU, convolutions that step are other kernels; and those that have groups tell nothing about those without."""

WIDTH = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
"""Bytes of a value by type; 4 where it is not said."""

ODD, ALIGNED = "matmul_odd", 8
"""Products of halves with a size that this number does not divide are kernels of another kind, and much slower."""

ROWS = "reduce_rows"
"""Sums of rows, of operators of the kind `reduce`: how fast they are depends on how wide the rows are."""

ALIKE = {"fp16": "bf16", "tf32": "fp32"}
"""Whose shapes stand in for a type that has none."""

Amount = tuple[float, float]
"""Operations, and values that are read and written at least."""


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


def _twice(amount: Callable[[Sequence[float]], Amount], times: float) -> Callable[[Sequence[float]], Amount]:
    def backward(shape: Sequence[float]) -> Amount:
        work, values = amount(shape)
        return times * work, 2 * values

    return backward


_AMOUNTS: dict[str, Callable[[Sequence[float]], Amount]] = {
    "matmul": _matmul,
    ODD: _matmul,
    "conv": _conv,
    "conv_backward": _twice(_conv, 2.0),
    "attention": _attention,
    "attention_backward": _twice(_attention, 2.5),
    "recurrent": _recurrent,
    "recurrent_backward": _twice(_recurrent, 2.0),
    "batch_norm": _batch_norm,
    "batch_norm_backward": _twice(_batch_norm, 1.0),
    "norm": _norm,
    "norm_backward": _twice(_norm, 1.0),
    ROWS: _sum,
}


def _place(kind: str, shapes: Any, apart: float = 1.0) -> Any:
    """Where shapes lie, so that what behaves alike is near: a convolution knows samples times places only.

    `apart` is how much farther strides are from each other than other sizes, where it is not 1.
    """
    import numpy as np

    logs = np.log(np.array(shapes, dtype=float))
    if kind in ("conv", "conv_backward"):
        rows = logs[..., :1] + logs[..., 3:4]
        grouped = (GROUPED if apart != 1 else 0.0) * (logs[..., 6:7] > 0)
        steps = [apart * logs[..., 5:6], logs[..., 6:7], grouped]
        logs = np.concatenate([rows, logs[..., 1:3], logs[..., 4:5], *steps, 4 * logs[..., 7:]], axis=-1)
    return logs


def _filled(shape: Sequence[float]) -> Sequence[float]:
    """A convolution as a CPU computes it: channels in blocks, of which the last may be half empty."""
    samples, cin, cout, *rest = shape
    return samples, *(c if c < BLOCK else BLOCK * math.ceil(c / BLOCK) for c in (cin, cout)), *rest


def work_of(kind: str, shape: Sequence[float]) -> float:
    """Operations of one call; of norms, the values that they normalise."""
    return _AMOUNTS[kind](shape)[0]


def values_of(kind: str, shape: Sequence[float]) -> float:
    """Values that one call reads and writes at least."""
    return _AMOUNTS[kind](shape)[1]


class Clouds:
    """The measured shapes of one device."""

    def __init__(self, device: DeviceSpec) -> None:
        self._device = device
        self._clouds = {(c.kernel, c.dtype): c for c in device.shape_times if c.kernel in _AMOUNTS}
        self._apart = APART if device.kind == "cpu" else 1.0
        self._learnt: dict[tuple[str, str], Any] = {}
        self._known: dict[tuple[Any, ...], float] = {}

    def seconds(self, kind: str, dtype: str, shape: tuple[float, ...]) -> float | None:
        """One call at a shape; None where the kind was not measured in that type."""
        if kind == "matmul" and any(round(size) % ALIGNED for size in shape[1:]) and (ODD, dtype) in self._clouds:
            kind = ODD
        cloud = self._clouds.get((kind, dtype)) or self._clouds.get((kind, ALIKE.get(dtype, dtype)))
        if cloud is None or len(cloud.shapes[0]) != len(shape) or min(shape) <= 0:
            return None
        key = (kind, dtype, shape)
        if key not in self._known:
            self._known[key] = self._ideal(kind, cloud.dtype, shape) * math.exp(self._between(cloud, shape))
        return self._known[key]

    def _ideal(self, kind: str, dtype: str, shape: Sequence[float]) -> float:
        """The roofline. A CPU starts, fetches and computes one after the other, so that times add up."""
        on_cpu = self._device.kind == "cpu"
        work, values = _AMOUNTS[kind](_filled(shape) if on_cpu and kind.startswith("conv") else shape)
        peak = self._device.peak.get(dtype) or max(self._device.peak.values())
        computing, moving = work / peak, values * WIDTH.get(dtype, 4.0) / self._device.bandwidth
        if on_cpu:
            return self._device.launch + computing + moving
        return max(computing, moving)

    def _between(self, cloud: ShapeTimes, shape: tuple[float, ...]) -> float:
        """The logarithm of the time over the ideal one: a plane through the nearest shapes, the nearer the heavier."""
        import numpy as np

        places, found = self._points(cloud)
        away = places - _place(cloud.kernel, shape, self._apart)
        square = (away**2).sum(1)
        near = np.argsort(square)[:NEAREST]
        weight = 1 / (square[near] + 0.05) ** 2
        rows = np.column_stack([np.ones(len(near)), away[near]])
        keep = np.diag([0.0, *[FLAT * weight.max()] * places.shape[1]])
        matrix = rows.T @ (rows * weight[:, None]) + keep
        answer = np.linalg.solve(matrix, rows.T @ (weight * found[near]))[0]
        return float(np.clip(answer, found[near].min(), found[near].max()))

    def _points(self, cloud: ShapeTimes) -> Any:
        """(logarithms of the sizes, logarithm of the time over the ideal one) of every measured shape."""
        import numpy as np

        key = (cloud.kernel, cloud.dtype)
        if key not in self._learnt:
            ideal = [self._ideal(cloud.kernel, cloud.dtype, s) for s in cloud.shapes]
            shares = np.log(np.array(cloud.seconds) / np.array(ideal))
            self._learnt[key] = _place(cloud.kernel, cloud.shapes, self._apart), shares
        return self._learnt[key]
