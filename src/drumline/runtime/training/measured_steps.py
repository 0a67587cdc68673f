"""The times of the steps of a training, and the typical one.

Steps are counted by intervals between meetings, where all ranks exchange messages. Where ranks step together, each step
is one. Where they step by themselves, most steps send nothing, and the last of an interval pays for all: their mean is
what counts.
"""

from __future__ import annotations

import statistics


class MeasuredSteps:
    """Seconds of steps. Those up to number `ignored` (from 0), which warm up or are profiled, do not count."""

    def __init__(self, ignored: int) -> None:
        self._ignored = ignored
        self.all: list[float] = []
        self._open: list[float] = []
        """Steps since the last meeting."""
        self._intervals: list[float] = []
        """Mean seconds of a step in each interval without an ignored step."""

    def add(self, seconds: float, *, met: bool) -> None:
        """Add a step, and whether all ranks met at its end."""
        self.all.append(seconds)
        self._open.append(seconds)
        if met:
            if len(self.all) - len(self._open) > self._ignored:
                self._intervals.append(statistics.fmean(self._open))
            self._open = []

    @property
    def counted(self) -> list[float]:
        """The steps that count; none in a short training."""
        return self.all[self._ignored + 1 :]

    @property
    def typical(self) -> float:
        """Seconds per step: the median over complete intervals, or the mean over what there is."""
        if self._intervals:
            return statistics.median(self._intervals)
        return statistics.fmean(self.counted) if self.counted else self.all[-1]
