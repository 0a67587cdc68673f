"""Several runs side by side as values: their summaries, and the steps and seconds that each took to the same loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .run import Run
from .step_summaries import (
    LossPoint,
    StalenessSummary,
    WaitSummary,
    first_at,
    mean_throughput,
    smoothed_losses,
    staleness_summary,
    wait_summary,
)

MOST_SMOOTHED = 50
"""Steps that a loss is averaged over, at most; of a short run a twentieth."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the runs, with what is compared."""

    name: str
    """The run's name; with its folder where two runs have the same."""
    run: Run
    losses: tuple[LossPoint, ...]
    """Smoothed."""
    waits: WaitSummary | None
    staleness: StalenessSummary | None
    samples_per_second: float | None
    """Over all ranks and the whole run; None if its time was not recorded."""
    reached: LossPoint | None
    """When its loss was low enough first."""

    @property
    def lowest(self) -> float | None:
        """The lowest smoothed loss; None if it has none."""
        return min((p.loss for p in self.losses if math.isfinite(p.loss)), default=None)


@dataclass(frozen=True, slots=True)
class UnreadableRun:
    """A run that cannot be shown."""

    folder: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs side by side."""

    runs: tuple[ComparedRun, ...]
    window: int
    """Steps that a loss is averaged over."""
    loss: float | None
    """The loss at which they are compared; None if no run has a loss."""
    given: bool
    """Whether that loss was asked for; otherwise it is the lowest that all runs reached."""
    unreadable: tuple[UnreadableRun, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Differences that make the runs hard to compare."""
        return [*_differences([c.run for c in self.runs]), *(f"{x.folder}: {x.reason}" for x in self.unreadable)]

    @property
    def smoothing(self) -> str:
        """How losses were smoothed, in words."""
        return f"A loss is the mean of the last {self.window} steps." if self.window > 1 else "Losses are not smoothed."

    def verdict(self) -> str:
        """One sentence: who reached the loss first, and last."""
        arrived = [(c.reached.seconds, c.name) for c in self.runs if c.reached and c.reached.seconds is not None]
        if self.loss is None or not arrived:
            return f"{len(self.runs)} runs side by side."
        (first, name), (last, slowest) = min(arrived), max(arrived)
        text = f"{name} reached a loss of {self.loss:.4g} after {_seconds(first)}"
        if name == slowest:
            return text + "."
        return text + (f", {slowest} after {_seconds(last)}: {last / first:.2f} times as long." if first else ".")


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"


def compare_runs(
    runs: Sequence[Run], *, loss: float | None = None, unreadable: Sequence[UnreadableRun] = ()
) -> Comparison:
    """Compare runs at a loss, by default the lowest that every run with a loss has reached."""
    window = _window(runs)
    smoothed = [tuple(smoothed_losses(run.steps, window)) for run in runs]
    lows = [min((p.loss for p in points if math.isfinite(p.loss)), default=None) for points in smoothed]
    common = max((low for low in lows if low is not None), default=None)
    at = loss if loss is not None else _rounded_up(common)
    compared = tuple(
        ComparedRun(
            name,
            run,
            points,
            wait_summary(run.steps),
            staleness_summary(run.steps),
            mean_throughput(run.steps),
            first_at(points, at) if at is not None else None,
        )
        for name, run, points in zip(_names(runs), runs, smoothed, strict=True)
    )
    return Comparison(compared, window, at, loss is not None, tuple(unreadable))


def _window(runs: Sequence[Run]) -> int:
    """A twentieth of the shortest run, the same for all, so that no run is smoothed more than another."""
    shortest = min((len(run.steps) for run in runs if run.steps), default=1)
    return max(1, min(MOST_SMOOTHED, shortest // 20))


def _rounded_up(loss: float | None) -> float | None:
    """A loss of four digits that is no lower, so that a run which reached the one has reached the other."""
    if loss is None or loss == 0:
        return loss
    unit = 10.0 ** (math.floor(math.log10(abs(loss))) - 3)
    return max(loss, float(f"{math.ceil(loss / unit - 1e-6) * unit:.4g}"))


def _names(runs: Sequence[Run]) -> list[str]:
    """The names of the runs; those that are equal get their folder."""
    often = Counter(run.name for run in runs)
    return [f"{run.name} ({run.folder})" if often[run.name] > 1 and run.folder else run.name for run in runs]


def _differences(runs: Sequence[Run]) -> list[str]:
    notes = []
    if len({(run.job, run.digest) for run in runs}) > 1:
        jobs = sorted({run.job for run in runs})
        what = ", ".join(jobs) if len(jobs) > 1 else f"{jobs[0]}, whose file was changed"
        notes.append(f"The runs are of different jobs ({what}): their losses may mean different things.")
    sizes = sorted({run.batch_size for run in runs})
    if len(sizes) > 1:
        notes.append(f"A step is not equally large in all runs: batches of {', '.join(map(str, sizes))} samples.")
    if len({run.machine for run in runs}) > 1:
        notes.append("The runs were made on different machines.")
    untimed = [run.name for run in runs if run.steps and all(s.elapsed is None for s in run.steps)]
    if untimed:
        notes.append(f"Without recorded seconds, and so not in the charts over time: {', '.join(untimed)}.")
    notes += [f"{run.name} failed: {run.failure}." for run in runs if run.failure]
    return notes
