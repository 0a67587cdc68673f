"""Clocks of CPU ranks. Those that share cores are measured by the time that the processor gave them.

What a rank waits for its turn depends on when a short kernel happens to run, but over a step everybody waits for the
same share of it: the processor's time, times how many share a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from .clock import Timing, timing_of
from .pace import Pace

BUDGET, LEAST, MOST = 0.009, 4, 60
"""Seconds for one case, and how often it is repeated."""
GROUP = 2e-4
"""Seconds that are timed at once, where an action is shorter: so that the clock itself does not count."""
BETWEEN, SMALL, LARGE = 4.0, 2**16, 2**24
"""Bytes of other memory that a step touches between two uses of a tensor, over the bytes of the tensor. Tensors that
are smaller stay in the caches; and at most."""
WARM = 2**20
"""A product reads what was just made, and a weight. Where both together have no more bytes, as many are touched."""
AGAIN = 3
"""How often a case is timed at most."""


def crowding(ranks: int, threads: int) -> float:
    """How many ranks of a host share one of its cores; 1 where each has its own."""
    return max(1.0, ranks * threads / len(os.sched_getaffinity(0)))


def own_clock(crowd: float) -> Callable[[], float]:
    """Seconds of this rank: of the wall where it has cores of its own, else the processor's times how many share it."""
    return time.perf_counter if crowd == 1 else lambda: crowd * time.process_time()


class Clock:
    """Times actions amid other work, as in a step: between two of them other memory is touched, so that caches hold
    less of what the next one needs. Where cores are shared, by the processor's time, times how many share a core.

    With a `pace`, what they would take at the pace of its reference.
    """

    def __init__(self, crowd: float = 1.0, pace: Pace | None = None) -> None:
        self._crowd, self._pace = crowd, pace
        self._now = time.perf_counter if crowd == 1 else time.process_time
        self._pool = torch.ones(2**24)
        self._place = 0

    def __call__(
        self, action: Callable[[], object], size: float = 0.0, *, budget: float = BUDGET, alike: str = "pointwise"
    ) -> Timing:
        """The median of many repeats of an action that reads and writes `size` bytes.

        `alike` is what slows it when the rank slows: `matmul` or `pointwise`. While something else holds the rank up,
        it is timed again.
        """
        action()
        if self._pace is None:
            return self._timed(action, size, budget, alike)
        for _ in range(AGAIN):
            found = self._timed(action, size, budget, alike)
            self._pace.look()
            if self._pace.is_calm():
                break
        slower = self._pace.now(alike)
        return Timing(found.seconds / slower, found.spread)

    def _timed(self, action: Callable[[], object], size: float, budget: float, alike: str) -> Timing:
        first = time.perf_counter()
        action()
        once = max(time.perf_counter() - first, 1e-7)
        between = max(1.0, min(BETWEEN, size / WARM)) if alike == "matmul" else BETWEEN
        touched = int(min(LARGE, between * size)) // 4 if size >= SMALL else 0
        inner = 1 if touched else max(1, int(GROUP / once))
        times: list[float] = []
        end = time.perf_counter() + budget * self._crowd
        while len(times) < LEAST or (time.perf_counter() < end and len(times) < MOST):
            self._touch(touched)
            start = self._now()
            for _ in range(inner):
                action()
            times.append((self._now() - start) / inner)
        found = timing_of(times)
        return Timing(found.seconds * self._crowd, found.spread)

    def _touch(self, count: int) -> None:
        """Other memory: the next piece of a pool that is larger than the caches."""
        if count:
            self._place = self._place + count if self._place + 2 * count <= self._pool.numel() else 0
            self._pool[self._place : self._place + count].add_(1.0)
