"""The roofline of a device, and the fraction of its peak that a matmul reaches by size."""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import DeviceSpec
from ..core.errors import ClusterError, InputError

MEMORY_EFFICIENCY = 0.8
"""Fraction of the memory bandwidth that a kernel reaches where no curve was measured."""

BYTES_PER_VALUE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "bf16-pure": 2, "fp8": 1}
"""Bytes per value that a matmul reads, by precision."""

STORED_BYTES = {**BYTES_PER_VALUE, "fp8": 2}
"""Bytes per value that a layer passes on, by precision: of fp8, only the inputs of matmuls are in fp8, as copies."""


def compute_type(precision: str) -> str:
    """The type that matmuls compute in, as `DeviceSpec.peak` names it."""
    return "bf16" if precision == "bf16-pure" else precision


@dataclass(frozen=True, slots=True)
class Roofline:
    """The bounds of a kernel: the compute peak and the memory bandwidth of a device."""

    peak: float
    """Operations per second."""
    bandwidth: float
    """Bytes per second."""

    @classmethod
    def of(cls, device: DeviceSpec, precision: str) -> Roofline:
        """From the data sheet of a device."""
        if precision not in device.peak:
            raise ClusterError(f"{device.name} has no rate for {precision}", rule=f"it has {', '.join(device.peak)}")
        return cls(device.peak[precision], device.bandwidth)

    @property
    def ridge(self) -> float:
        """Operations per byte above which compute is the bound."""
        return self.peak / self.bandwidth

    def rate(self, intensity: float) -> float:
        """Attainable operations per second at an intensity in operations per byte: min(peak, intensity bandwidth)."""
        return min(self.peak, intensity * self.bandwidth)

    def seconds(self, flops: float, bytes: float) -> float:
        """max(flops / peak, bytes / bandwidth)."""
        return max(flops / self.peak, bytes / self.bandwidth)

    def bound(self, flops: float, bytes: float) -> str:
        """`compute` or `memory`."""
        return "compute" if flops >= self.ridge * bytes else "memory"


@dataclass(frozen=True, slots=True)
class MatmulCost:
    """Cost of an (m x k) by (k x n) matmul on a device."""

    m: int
    n: int
    k: int
    flops: float
    bytes: float
    """Both inputs read and the output written, each once."""
    seconds: float
    efficiency: float
    """Fraction of the peak of the device."""

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


def matmul(device: DeviceSpec, precision: str, m: int, n: int, k: int) -> MatmulCost:
    """2mnk operations on (mk + kn + mn) values, at the measured rate of this size or the memory bandwidth.

    70% of the peak where no curve was measured. Never shorter than one launch.
    """
    if min(m, n, k) < 1:
        raise InputError(f"a matmul of {m} x {k} and {k} x {n}", rule="at least one row, column and term")
    roof = Roofline.of(device, precision)
    flops, moved = 2.0 * m * n * k, float(BYTES_PER_VALUE[precision]) * (m * k + k * n + m * n)
    curve = device.curve_of("matmul", precision)
    rate = curve.at(flops) if curve is not None else 0.7 * roof.peak
    seconds = max(flops / rate, moved / (MEMORY_EFFICIENCY * roof.bandwidth), device.launch)
    return MatmulCost(m, n, k, flops, moved, seconds, flops / seconds / roof.peak)
