"""The kernels of a CPU rank: shapes of what compute bounds, sizes of the rest, all ranks at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from ..models.profile import COMPUTE_KINDS
from .clock import Timing, timing_of
from .cpu_shapes import measure_cpu_shapes
from .cpu_streams import measure_cpu_streams
from .gpu import Kernels, along_work
from .journal import Journal
from .kernels import Point, geometric_mean
from .often import Often
from .pace import SIZES, Look, Pace
from .pulse import OWN, in_a_row, looks
from .shared import Clock

LOOKS, REST = 16, 0.01
"""Looks before anything is timed, and seconds between them. Single looks amid kernels are compared with these: those of
a row would be so much faster that a rank would seem to be held up all the time."""
GAP, LEAST = 2.0, 7
"""Seconds from one call of what is done between cases to the next, for a rank that has a core; and how often it is
called at least, where most of the cases were timed before.
"""


def measure_cpu(
    device: torch.device,
    crowd: float,
    report: Callable[[str], None],
    journal: Journal,
    between: Callable[[], None] = lambda: None,
) -> Kernels:
    """Measure this rank, or go on with it. Every number is told at the pace that the rank had on average.

    `between` is called again and again, spread over the time that it takes.
    """
    look, rows = Look(device, crowded=crowd > 1), []

    def amid() -> None:
        between()
        rows.append(in_a_row(look, crowded=crowd > 1))

    often = Often(amid, GAP * crowd)
    seen = looks(device, LOOKS, rest=REST)
    first = {k: timing_of([s[k] for s in seen]) for k in SIZES}
    then = {k: journal.timed(("pulse", k), functools.partial(first.__getitem__, k)) for k in SIZES}
    pace = Pace(look, {k: timing.seconds for k, timing in then.items()})
    clock = Clock(crowd, pace)
    spots = measure_cpu_shapes(clock, report, journal, often)
    report("memory")
    streams = measure_cpu_streams(clock, journal, often)
    often.fill(LEAST)
    usual = {k: pace.usual(k) for k in SIZES}
    spots = [replace(s, timing=_times(s.timing, usual[_alike(s.kernel)])) for s in spots]
    streams = [replace(p, timing=_times(p.timing, usual["pointwise"])) for p in streams]
    pulse = [Point(OWN[k], size, _usual([row[k] for row in rows])) for k, size in SIZES.items()]
    return Kernels({"fp32": along_work(spots, 4.0) + streams + pulse}, {"fp32": spots})


def _usual(seconds: list[float]) -> Timing:
    return Timing(geometric_mean(seconds), timing_of(seconds).spread)


def _alike(kernel: str) -> str:
    return "matmul" if kernel in COMPUTE_KINDS else "pointwise"


def _times(timing: Timing, factor: float) -> Timing:
    return Timing(timing.seconds * factor, timing.spread)
