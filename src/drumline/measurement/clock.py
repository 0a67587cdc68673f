"""Timing on a machine that others use too: many short repeats, their median, and how far they spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of the repeats, and half of their interquartile range over it."""

    seconds: float
    spread: float


def clock(
    action: Callable[[], object], *, budget: float = 0.04, least: int = 5, most: int = 2000, device: str = "cpu"
) -> Timing:
    """Time an action until the budget of seconds is spent, at least `least` times, after two calls to warm up."""
    action()
    action()
    settle(device)
    first = time.perf_counter()
    action()
    settle(device)
    once = max(time.perf_counter() - first, 1e-7)
    inner = max(1, int(2e-4 / once))  # short actions are timed in groups, so that the clock itself does not count
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        start = time.perf_counter()
        for _ in range(inner):
            action()
        settle(device)
        times.append((time.perf_counter() - start) / inner)
    return timing_of(times)


AHEAD, FARTHEST, ASLEEP = 2.0, 400e-6, 2e-3
"""How long a GPU sleeps for each call that it is told of meanwhile, in what the host takes for one; at most, because
the host may have been held up; and for all of them."""

_CYCLES = 2.0e9
"""At least the clock of a GPU: what it sleeps through is not counted, so that it need not be exact."""


def clock_gpu(action: Callable[[], object], *, budget: float = 0.008, least: int = 3, most: int = 12) -> Timing:
    """What a GPU needs for an action, without the host: calls are queued behind a sleeping kernel, and timed by events.

    Repeated until half of the interquartile range is within 2% of the median, or the budget of seconds is spent.
    """
    action()
    ahead = min(FARTHEST, AHEAD * min(told(action) for _ in range(2)))
    once = max(between_events(action, 1, ahead), 2e-6)
    repeats = max(1, min(40, int(budget / 4 / once), int(ASLEEP / ahead)))
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (len(times) < most and time.perf_counter() < end and timing_of(times).spread > 0.02):
        times.append(between_events(action, repeats, ahead))
    return timing_of(times)


def told(action: Callable[[], object]) -> float:
    """What the host takes to tell a GPU of it. A GPU that is not done with what it was told does not hold it up."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def between_events(action: Callable[[], object], repeats: int, ahead: float) -> float:
    """What a GPU takes for each of some calls, if it sleeps `ahead` seconds for each of them before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(_CYCLES * ahead * repeats))
    start.record()
    for _ in range(repeats):
        action()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats


def timing_of(times: list[float]) -> Timing:
    quarters = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    return Timing(median, (quarters[2] - quarters[0]) / 2 / median)


def settle(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()
