"""Timings of kernels by size and shape, and the minimum time of an operator.

All ranks measure at the same time, as they will train: they share memory and caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..costs.shape_interpolation import UNALIGNED_MATMUL, kernel_values, kernel_work
from ..models.profile import COMPUTE_KINDS
from ..torchkit.operators import fused_adamw_
from .cpu_clock import CpuClock
from .timing import Timing, synchronize, time_action


@dataclass(frozen=True, slots=True)
class KernelPoint:
    """One kernel at one size."""

    kernel: str
    size: float
    """Operations for compute-bound kernels, else bytes read and written."""
    timing: Timing

    @property
    def rate(self) -> float:
        """Size per second."""
        return self.size / self.timing.seconds


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """One kernel at one shape."""

    kernel: str
    shape: tuple[float, ...]
    timing: Timing


@dataclass(frozen=True, slots=True)
class KernelTimings:
    """All kernels of a device, by type."""

    points: dict[str, list[KernelPoint]]
    shapes: dict[str, list[ShapeTiming]]


def points_by_work(timings: list[ShapeTiming], width: float) -> list[KernelPoint]:
    """One point per factor of four in size (operations or bytes), for operators of unknown shape.

    `width` is the bytes of a value.
    """
    buckets: dict[tuple[str, int], list[tuple[float, ShapeTiming]]] = {}
    for timed in timings:
        compute = timed.kernel in COMPUTE_KINDS or timed.kernel == UNALIGNED_MATMUL
        size = kernel_work(timed.kernel, timed.shape) if compute else width * kernel_values(timed.kernel, timed.shape)
        buckets.setdefault((timed.kernel, int(math.log(size, 4))), []).append((size, timed))
    points = []
    for (kernel, _), sized in sorted(buckets.items(), key=lambda item: item[0]):
        near = [s for _, s in sized]
        work = geometric_mean([size for size, _ in sized])
        rate = geometric_mean([size / s.timing.seconds for size, s in sized])
        points.append(KernelPoint(kernel, work, Timing(work / rate, max(s.timing.spread for s in near))))
    return points


def measure_launch(device: torch.device, threads_per_core: float = 1.0) -> float:
    """Minimum time of one operator with autograd: a long chain of additions, forward and backward."""
    x = torch.ones(4, device=device, requires_grad=True)
    depth = 100

    def chain() -> None:
        y = x
        for _ in range(depth):
            y = y + 1.0
        y.sum().backward()
        synchronize(device.type)

    timing = (
        time_action(chain, device="cuda") if device.type == "cuda" else CpuClock(threads_per_core)(chain, budget=0.06)
    )
    return timing.seconds / (2 * depth)


def adamw_update(
    p: list[torch.Tensor],
    g: list[torch.Tensor],
    m: list[torch.Tensor],
    v: list[torch.Tensor],
    steps: list[torch.Tensor],
) -> None:
    """AdamW's fused kernel on lists of parameters, gradients and moments."""
    options: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    fused_adamw_(p, g, m, v, [], steps, lr=1e-3, amsgrad=False, maximize=False, **options)


def geometric_mean(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(math.log(v) for v in values) / len(values))
