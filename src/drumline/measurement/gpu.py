"""The kernels of a GPU, in every type that its plans compute in: shapes of what compute bounds, sizes of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..costs.clouds import ODD, WIDTH, values_of, work_of
from ..models.profile import COMPUTE_KINDS
from .clock import Timing
from .journal import Journal
from .kernels import Point
from .often import Often
from .shapes import TYPES, Spot, measure_shapes
from .streams import measure_streams, measure_updates

STREAMS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The types in which kernels bound by memory are measured: what they move per second hardly depends on more."""

GAP = 2.0
"""Seconds from one look at the host to the next, amid the kernels."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """All of them, by type."""

    points: dict[str, list[Point]]
    spots: dict[str, list[Spot]]


def measure_gpu(
    device: torch.device, report: Callable[[str], None], journal: Journal, between: Callable[[], None]
) -> Kernels:
    """Measure this rank's GPU, or go on with it. `between` is called again and again, all along."""
    often = Often(between, GAP)
    spots = {name: measure_shapes(device, name, report, journal, often) for name in TYPES}
    points = {name: along_work(found, WIDTH.get(name, 4.0)) for name, found in spots.items()}
    report("memory")
    for name, dtype in STREAMS.items():
        points[name] = points[name] + measure_streams(device, dtype, journal, often) + measure_updates(device, dtype)
    torch.cuda.empty_cache()
    return Kernels(points, spots)


def along_work(spots: list[Spot], width: float) -> list[Point]:
    """One point for every fourfold of the size, in operations or bytes: what is left when no shape is known.

    `width` is how many bytes a value has.
    """
    found: dict[tuple[str, int], list[tuple[float, Spot]]] = {}
    for spot in spots:
        compute = spot.kernel in COMPUTE_KINDS or spot.kernel == ODD
        size = work_of(spot.kernel, spot.shape) if compute else width * values_of(spot.kernel, spot.shape)
        found.setdefault((spot.kernel, int(math.log(size, 4))), []).append((size, spot))
    points = []
    for (kernel, _), sized in sorted(found.items(), key=lambda item: item[0]):
        near = [s for _, s in sized]
        work = _middle([size for size, _ in sized])
        rate = _middle([size / s.timing.seconds for size, s in sized])
        points.append(Point(kernel, work, Timing(work / rate, max(s.timing.spread for s in near))))
    return points


def _middle(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
