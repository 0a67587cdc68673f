"""Summaries of the records of a run: waiting by rank, staleness, throughput over time, and smoothed losses."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .step_records import StepRecord

THROUGHPUT_POINTS = 60
"""Points of the throughput over time: each is the mean over that part of the run."""


@dataclass(frozen=True, slots=True)
class WaitSummary:
    """How long each rank waited for the others."""

    seconds: tuple[float, ...]
    """By rank."""
    period: float
    """The seconds in which they did."""
    network_share: float | None = None
    """Share of the time spent in messages that no rank was late for: the median of the measured steps."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the time, by rank."""
        return tuple(min(1.0, s / self.period) for s in self.seconds)

    @property
    def mean_share(self) -> float:
        """The mean over ranks."""
        return statistics.fmean(self.shares)

    @property
    def longest(self) -> int:
        """The rank that waited most."""
        return max(range(len(self.seconds)), key=lambda r: self.seconds[r])

    @property
    def shortest(self) -> int:
        """The rank that waited least: the one that the others waited for."""
        return min(range(len(self.seconds)), key=lambda r: self.seconds[r])


def wait_summary(steps: Sequence[StepRecord]) -> WaitSummary | None:
    """Waiting over all records that have it; None if it was not measured."""
    measured = [s for s in steps if s.wait_seconds]
    if not measured:
        return None
    ranks = max(len(s.wait_seconds) for s in measured)
    total = [math.fsum(s.wait_seconds[r] for s in measured if r < len(s.wait_seconds)) for r in range(ranks)]
    period = _period(steps, measured[-1])
    shares = [s.network_share for s in measured if s.network_share is not None]
    return WaitSummary(tuple(total), period, statistics.median(shares) if shares else None) if period > 0 else None


def _period(steps: Sequence[StepRecord], last: StepRecord) -> float:
    """The seconds of a run up to a record: by its clock, or else the sum of its steps."""
    if last.elapsed is not None:
        return last.elapsed
    return math.fsum(s.seconds for s in steps if s.step <= last.step)


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """The gradients of one worker."""

    gradients: int
    mean_staleness: float


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """How old the weights were that gradients were computed on."""

    counts: dict[int, int]
    """Gradients by staleness, ascending."""
    dropped: int = 0
    workers: dict[int, WorkerSummary] | None = None
    """By worker; None where an update is made of gradients of several."""

    @property
    def gradients(self) -> int:
        """How many were applied."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """The mean staleness."""
        return sum(value * n for value, n in self.counts.items()) / self.gradients

    @property
    def largest(self) -> int:
        """The highest staleness."""
        return max(self.counts)


def staleness_summary(steps: Sequence[StepRecord]) -> StalenessSummary | None:
    """The staleness of all gradients of a run; None if no gradient has one."""
    counts = Counter(value for s in steps for value in s.staleness)
    if not counts:
        return None
    by_worker: dict[int, list[int]] = {}
    for s in steps:
        if s.worker is not None and s.staleness:
            by_worker.setdefault(s.worker, []).extend(s.staleness)
    workers = {w: WorkerSummary(len(v), statistics.fmean(v)) for w, v in sorted(by_worker.items())} or None
    return StalenessSummary(dict(sorted(counts.items())), steps[-1].dropped, workers)


def throughput(steps: Sequence[StepRecord], points: int = THROUGHPUT_POINTS) -> list[tuple[float, float]]:
    """(seconds of the run, samples per second over all ranks), a point for each part; empty without a clock."""
    timed = [(s.elapsed, s.samples) for s in steps if s.elapsed is not None]
    size = max(1, math.ceil(len(timed) / points))
    rates: list[tuple[float, float]] = []
    begin = 0.0
    for at in range(0, len(timed), size):
        part = timed[at : at + size]
        end = part[-1][0]
        if end > begin:
            rates.append((end, sum(samples for _, samples in part) / (end - begin)))
            begin = end
    return rates


def mean_throughput(steps: Sequence[StepRecord]) -> float | None:
    """Samples per second over all ranks and the whole run; None without a clock."""
    timed = [s for s in steps if s.elapsed is not None]
    end = timed[-1].elapsed if timed else None
    return sum(s.samples for s in timed) / end if end else None


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The smoothed loss after a step."""

    steps: int
    """Taken so far."""
    seconds: float | None
    """Seconds of the run so far; None if they were not recorded."""
    loss: float
    """Mean over the last steps."""


def smoothed_losses(steps: Sequence[StepRecord], window: int) -> list[LossPoint]:
    """The mean of the last `window` losses, from the first step that has them; not finite if one of them is not."""
    sums = [0.0, *itertools.accumulate(s.loss if math.isfinite(s.loss) else 0.0 for s in steps)]
    bad = [0, *itertools.accumulate(not math.isfinite(s.loss) for s in steps)]
    return [
        LossPoint(
            s.step + 1, s.elapsed, math.nan if bad[i] > bad[i - window] else (sums[i] - sums[i - window]) / window
        )
        for i, s in enumerate(steps, start=1)
        if i >= window
    ]


def first_at(points: Sequence[LossPoint], loss: float) -> LossPoint | None:
    """The first point with at most that loss."""
    return next((p for p in points if p.loss <= loss), None)
