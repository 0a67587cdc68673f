"""The kernels of a CPU rank: shapes of what compute bounds, sizes of the rest, all ranks at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from .clock import Timing, timing_of
from .cpu_shapes import measure_cpu_shapes
from .cpu_streams import measure_cpu_streams
from .gpu import Kernels, along_work
from .journal import Journal
from .kernels import Point
from .pulse import OWN, SIZES, looks
from .shared import Clock

LOOKS = 8
"""At the speed of the moment: before, between and after."""


def measure_cpu(device: torch.device, crowd: float, report: Callable[[str], None], journal: Journal) -> Kernels:
    """Measure this rank, or go on with it."""
    clock = Clock(crowd)
    before = looks(device, LOOKS)
    spots = measure_cpu_shapes(clock, report, journal)
    between = looks(device, LOOKS)
    report("memory")
    points = along_work(spots, 4.0) + measure_cpu_streams(clock, journal)
    pulse = _pulse([*before, *between, *looks(device, LOOKS)])
    return Kernels({"fp32": points + pulse}, {"fp32": spots})


def _pulse(seen: list[dict[str, float]]) -> list[Point]:
    """How fast the rank was while its kernels were measured."""
    found = []
    for kernel, size in SIZES.items():
        times = timing_of([size / rates[kernel] for rates in seen])
        found.append(Point(OWN[kernel], size, Timing(size / statistics.mean(r[kernel] for r in seen), times.spread)))
    return found
