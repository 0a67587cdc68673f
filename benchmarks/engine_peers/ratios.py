"""Ratios of step times with their 95% intervals, and verdicts against a bound."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 2000


@dataclass(frozen=True)
class Ratio:
    """The median over the blocks, and its 95% interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"

    def at_most(self, bound: float) -> str:
        """Judge whether the interval is below a bound."""
        return "kept" if self.high <= bound else "missed" if self.low > bound else "open: the interval holds the bound"

    def not_behind(self) -> str:
        """Compare with 1; contestants on the same DDP are indistinguishable (`level`)."""
        return "behind" if self.low > 1 else "ahead" if self.high < 1 else "level"

    def at_least(self, bound: float) -> str:
        """Judge whether the interval is above a bound."""
        return "kept" if self.low >= bound else "missed" if self.high < bound else "open: the interval holds the bound"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Divide `over` by `under` block by block; the interval is a bootstrap over the blocks."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(each, k=len(each))) for _ in range(DRAWS))
    return Ratio(statistics.median(each), medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS) - 1])
