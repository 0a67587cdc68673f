"""Clocks of CPU ranks. Ranks that share cores are timed by CPU time, times the threads per core.

The wait for a core depends on when a short kernel happens to run; over a step, all ranks wait for the same share.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .speed_probe import SpeedTracker
from .timing import Timing, timing_of

BUDGET, LEAST, MOST = 0.009, 4, 60
"""Seconds for one case, and its least and most repeats."""
GROUP = 2e-4
"""Seconds timed at once if an action is shorter: reading the clock takes time too."""
BETWEEN, SMALL, LARGE = 4.0, 2**16, 2**24
"""Bytes of other memory touched between two uses of a tensor, relative to its size, as in a step; the size below which
a tensor stays in the caches; the most bytes touched."""
WARM = 2**20
"""A matmul reads a fresh activation and a weight. Up to this many bytes, as many bytes are touched."""
MAX_ATTEMPTS = 3
"""Attempts at timing a case."""


def rank_clock(threads_per_core: float) -> Callable[[], float]:
    """Seconds of this rank: wall time if it has its own cores, else CPU time times the threads per core."""
    return time.perf_counter if threads_per_core == 1 else lambda: threads_per_core * time.process_time()


class CpuClock:
    """Times actions as in a step: other memory is touched between repeats, so that caches are partly cold. Shared
    cores are timed by CPU time, times the threads per core.

    With a `tracker`, timings are scaled to the speed of its reference.
    """

    def __init__(self, threads_per_core: float = 1.0, tracker: SpeedTracker | None = None) -> None:
        self._threads_per_core, self._tracker = threads_per_core, tracker
        self._now = time.perf_counter if threads_per_core == 1 else time.process_time
        self._pool = torch.ones(2**24)
        self._place = 0

    def __call__(
        self, action: Callable[[], object], size: float = 0.0, *, budget: float = BUDGET, alike: str = "pointwise"
    ) -> Timing:
        """Median of many repeats of an action that reads and writes `size` bytes.

        `alike` is the probe kernel that slows down with it: `matmul` or `pointwise`. A disturbed timing is repeated.
        """
        action()
        if self._tracker is None:
            return self._timed(action, size, budget, alike)
        for _ in range(MAX_ATTEMPTS):
            timing = self._timed(action, size, budget, alike)
            self._tracker.sample()
            if self._tracker.is_undisturbed():
                break
        return Timing(timing.seconds / self._tracker.recent_slowdown(alike), timing.spread)

    def _timed(self, action: Callable[[], object], size: float, budget: float, alike: str) -> Timing:
        first = time.perf_counter()
        action()
        once = max(time.perf_counter() - first, 1e-7)
        between = max(1.0, min(BETWEEN, size / WARM)) if alike == "matmul" else BETWEEN
        touched = int(min(LARGE, between * size)) // 4 if size >= SMALL else 0
        inner = 1 if touched else max(1, int(GROUP / once))
        times: list[float] = []
        end = time.perf_counter() + budget * self._threads_per_core
        while len(times) < LEAST or (time.perf_counter() < end and len(times) < MOST):
            self._touch(touched)
            start = self._now()
            for _ in range(inner):
                action()
            times.append((self._now() - start) / inner)
        timing = timing_of(times)
        return Timing(timing.seconds * self._threads_per_core, timing.spread)

    def _touch(self, count: int) -> None:
        """Touch the next piece of a pool that is larger than the caches."""
        if count:
            self._place = self._place + count if self._place + 2 * count <= self._pool.numel() else 0
            self._pool[self._place : self._place + count].add_(1.0)
