"""Timing on a shared machine: many short repeats, their median, and their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..torchkit.operators import spin


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of the repeats, and half of their interquartile range relative to it."""

    seconds: float
    spread: float


def time_action(
    action: Callable[[], object], *, budget: float = 0.04, least: int = 5, most: int = 2000, device: str = "cpu"
) -> Timing:
    """Time an action until the budget of seconds is spent, at least `least` times, after two warm-up calls."""
    action()
    action()
    synchronize(device)
    first = time.perf_counter()
    action()
    synchronize(device)
    once = max(time.perf_counter() - first, 1e-7)
    inner = max(1, int(2e-4 / once))  # short actions are timed in groups: reading the clock takes time too
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        start = time.perf_counter()
        for _ in range(inner):
            action()
        synchronize(device)
        times.append((time.perf_counter() - start) / inner)
    return timing_of(times)


SLEEP_FACTOR, MAX_SLEEP_PER_CALL, MAX_SLEEP = 2.0, 400e-6, 2e-3
"""Sleep of a GPU for each call that is queued meanwhile, relative to the launch time; its maximum in seconds, because
the launch may have been disturbed; and the maximum for all calls."""

_CYCLES = 2.0e9
"""Upper bound of a GPU's clock rate. The sleep is not timed, so it need not be exact."""


def time_gpu(action: Callable[[], object], *, budget: float = 0.008, least: int = 3, most: int = 12) -> Timing:
    """Time a GPU without its host: calls are queued behind a sleeping kernel and timed by events.

    Repeated until half of the interquartile range is within 2% of the median, or the budget of seconds is spent.
    """
    action()
    ahead = min(MAX_SLEEP_PER_CALL, SLEEP_FACTOR * min(host_launch_seconds(action) for _ in range(2)))
    once = max(gpu_event_seconds(action, 1, ahead), 2e-6)
    repeats = max(1, min(40, int(budget / 4 / once), int(MAX_SLEEP / ahead)))
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (len(times) < most and time.perf_counter() < end and timing_of(times).spread > 0.02):
        times.append(gpu_event_seconds(action, repeats, ahead))
    return timing_of(times)


def host_launch_seconds(action: Callable[[], object]) -> float:
    """Seconds that the host takes to launch an action; a busy GPU does not delay it."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def gpu_event_seconds(action: Callable[[], object], repeats: int, ahead: float) -> float:
    """GPU seconds of each of `repeats` calls, after a sleep of `ahead` seconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(int(_CYCLES * ahead * repeats))
    start.record()
    for _ in range(repeats):
        action()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats


def timing_of(times: list[float]) -> Timing:
    """Median and relative spread of some times."""
    median = statistics.median(times)
    if len(times) < 2 or not median:
        return Timing(median, 0.0)
    quarters = statistics.quantiles(times, n=4)
    return Timing(median, (quarters[2] - quarters[0]) / 2 / median)


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


class RateLimited:
    """Calls an action at most once every `gap` seconds."""

    def __init__(self, action: Callable[[], None], gap: float) -> None:
        self._action, self._gap = action, gap
        self._calls, self._last = 0, time.monotonic()

    def __call__(self) -> None:
        """Call it if `gap` seconds have passed."""
        if time.monotonic() - self._last >= self._gap:
            self._call()

    def ensure_calls(self, least: int) -> None:
        """Call it until it was called `least` times in all."""
        while self._calls < least:
            self._call()

    def _call(self) -> None:
        self._action()
        self._calls, self._last = self._calls + 1, time.monotonic()
