"""How fast a rank is at the moment: a product and a stream, looked at again and again while something else is timed.

A core that is shared with others' machines is half as slow again for some milliseconds or some seconds. What is timed
meanwhile is told as it would be at the rank's usual pace, so that kernels that were timed at different moments fit
together.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from .clock import settle

SIZES = {"matmul": 2.0 * 512 * 256 * 256, "pointwise": 3.0 * 4 * 2**19}
"""What is looked at, and its size: operations of a product, bytes of a sum."""
OTHERS = 2**18
"""Values of other memory that are touched before each: what slows a step may be the memory."""
RECENT = 4
"""Looks that tell the pace of what was timed between the last two of them: one alone is too short."""
HELD = math.log(1.7)
"""How far the pace of a core comes and goes by itself, in logarithms. What is beyond it is another program's doing."""
PRODUCTS = 0.6
"""How much of a step's pace is that of products; the rest is that of streams."""


class Look:
    """One look takes about a millisecond. Ranks that share cores look by the processor's time, as they are timed."""

    def __init__(self, device: torch.device, *, crowded: bool) -> None:
        self._device = device.type
        self._now = time.process_time if crowded else time.perf_counter
        shapes = (512, 256), (256, 256), (2**19,), (2**19,)
        self._tensors = tuple(torch.randn(shape, device=device) for shape in shapes)
        self._others = torch.ones(OTHERS if device.type == "cpu" else 0)
        self()

    def __call__(self) -> dict[str, float]:
        """Seconds of each kernel."""
        a, b, x, y = self._tensors
        return {"matmul": self._least(lambda: a @ b), "pointwise": self._least(lambda: x + y)}

    def _least(self, action: Callable[[], object]) -> float:
        """Of two: an interrupt is not the pace."""
        times = []
        for _ in range(2):
            self._others.add_(1.0)
            start = self._now()
            action()
            settle(self._device)
            times.append(self._now() - start)
        return max(1e-9, min(times))


class Pace:
    """The pace of a rank over some time, against seconds that looks took before."""

    def __init__(self, look: Look, reference: Mapping[str, float]) -> None:
        self._look, self._reference = look, reference
        self._seen: dict[str, list[float]] = {kernel: [] for kernel in reference}
        for _ in range(RECENT):
            self.look()

    def look(self) -> None:
        """Once more."""
        now = self._look()
        for kernel, seconds in self._reference.items():
            self._seen[kernel].append(max(-HELD, min(HELD, math.log(now[kernel] / seconds))))

    def is_calm(self) -> bool:
        """Whether nothing held the rank up at the last look."""
        return all(abs(seen[-1]) < HELD for seen in self._seen.values())

    def now(self, kernel: str) -> float:
        """How many times as long as before the kernel takes, by the last looks."""
        return math.exp(statistics.mean(self._seen[kernel][-RECENT:]))

    def usual(self, kernel: str) -> float:
        """The same, by all looks."""
        return math.exp(statistics.mean(self._seen[kernel]))
