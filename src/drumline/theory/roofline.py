"""The roofline of a device, and how much of its peak a product of matrices reaches over its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import DeviceSpec
from ..core.errors import ClusterError, InputError

MEMORY_EFFICIENCY = 0.8
"""Fraction of the memory bandwidth that a kernel reaches where no curve was measured."""

BYTES_PER_VALUE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "bf16-pure": 2, "fp8": 1}
"""Bytes per value, by precision."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """What bounds a kernel: the device's operations, or the bytes that it can move to them."""

    peak: float
    """Operations per second."""
    bandwidth: float
    """Bytes per second."""

    @classmethod
    def of(cls, device: DeviceSpec, precision: str) -> Roofline:
        """By the data sheet of a device."""
        if precision not in device.peak:
            raise ClusterError(f"{device.name} has no rate for {precision}", rule=f"it has {', '.join(device.peak)}")
        return cls(device.peak[precision], device.bandwidth)

    @property
    def ridge(self) -> float:
        """Operations per byte from which on compute is the bound."""
        return self.peak / self.bandwidth

    def rate(self, intensity: float) -> float:
        """Operations per second at best of a kernel of so many operations per byte: min(peak, intensity bandwidth)."""
        return min(self.peak, intensity * self.bandwidth)

    def seconds(self, flops: float, bytes: float) -> float:
        """max(flops / peak, bytes / bandwidth)."""
        return max(flops / self.peak, bytes / self.bandwidth)

    def bound(self, flops: float, bytes: float) -> str:
        """`compute` or `memory`."""
        return "compute" if flops >= self.ridge * bytes else "memory"


@dataclass(frozen=True, slots=True)
class Matmul:
    """A product of an m x k and a k x n matrix, and what it takes on a device."""

    m: int
    n: int
    k: int
    flops: float
    bytes: float
    """Both factors read, the product written, each once."""
    seconds: float
    efficiency: float
    """The share of the device's peak that it reaches."""

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


def matmul(device: DeviceSpec, precision: str, m: int, n: int, k: int) -> Matmul:
    """2mnk operations on (mk + kn + mn) values: as fast as the device's curve at this size says, and its memory lets.

    Where no curve was measured, 70% of the peak. Never shorter than one launch.
    """
    if min(m, n, k) < 1:
        raise InputError(f"a product of {m} x {k} and {k} x {n}", rule="at least one row, column and term")
    roof = Roofline.of(device, precision)
    flops, moved = 2.0 * m * n * k, float(BYTES_PER_VALUE[precision]) * (m * k + k * n + m * n)
    curve = device.curve_of("matmul", precision)
    rate = curve.at(flops) if curve is not None else 0.7 * roof.peak
    seconds = max(flops / rate, moved / (MEMORY_EFFICIENCY * roof.bandwidth), device.launch)
    return Matmul(m, n, k, flops, moved, seconds, flops / seconds / roof.peak)
