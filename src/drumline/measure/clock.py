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
    quarters = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    return Timing(median, (quarters[2] - quarters[0]) / 2 / median)


def settle(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()
