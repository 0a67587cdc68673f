"""A point of a curve: what this rank's device computes per second at one size. And what any operator takes at least.

All ranks measure at the same time, because that is how they will train: they share memory and caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .clock import Timing, clock, settle
from .shared import Clock


@dataclass(frozen=True, slots=True)
class Point:
    """One kernel at one size."""

    kernel: str
    size: float
    """Operations for kernels bound by compute, else bytes read and written."""
    timing: Timing

    @property
    def rate(self) -> float:
        """Size per second."""
        return self.size / self.timing.seconds


def measure_launch(device: torch.device, crowd: float = 1.0) -> float:
    """What one operator costs however small it is, with autograd: a long chain of additions, there and back."""
    x = torch.ones(4, device=device, requires_grad=True)
    depth = 100

    def chain() -> None:
        y = x
        for _ in range(depth):
            y = y + 1.0
        y.sum().backward()
        settle(device.type)

    timing = clock(chain, device="cuda") if device.type == "cuda" else Clock(crowd)(chain, budget=0.06)
    return timing.seconds / (2 * depth)


def geometric_mean(values: list[float]) -> float:
    """Of rates that several ranks measured."""
    return math.exp(sum(math.log(v) for v in values) / len(values))
