"""Fits corrections to observed runs: measured over predicted time of each part of a step.

There are four levels of factors, from general to specific, each fitted to the residuals of the one before: the machine,
the model, the kind of plan, and the model under that kind of plan. A ratio is first assumed to hold for all plans:
otherwise a plan would win because it has never been tried. With few models, the machine's factors are shrunk towards 1.
The last level makes the next run of the same model accurate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..clusters.corrections import CorrectionFactor, Corrections
from .corrections import bounded
from .observed_runs import COMPUTE, PARTS, ObservedRun

# Tuning constants, explained in docs/calibration.md. They have no unit unless stated.

AGE_DECAY = 0.6
"""The weight of a run relative to the next newer one of the same model and kind of plan. Higher: slower to adapt."""
FEW_STEPS = 10
"""Counted steps below which a run weighs less."""
LARGE_SPREAD = 0.1
"""Relative spread of its steps above which a run weighs less: something else was running."""
RUN_NOISE = 2.0
"""Difference between a run and the next of the same job, in spreads of its steps; the machine's drift is added. Higher:
smaller corrections."""
MOST_NOISE = 1e3
"""Noise over signal beyond which nothing is corrected."""
SHARED_LEVELS = ("machine", "kind")
"""Levels fitted to several models. Their runs were made within minutes, so more of them do not reduce the noise."""
SMALL_SHARE = 0.1
"""Share of the step below which a part weighs less: its clock is inaccurate."""
OUTLIER = math.log(1.5)
"""Distance from the median (logarithm) at which a run is clipped."""
SHRINKAGE = {"machine": 0.5, "job": 0.02, "kind": 1.0, "own": 0.1}
"""By level: n runs (models, at shared levels) move it by n / (n + this). Higher: smaller corrections."""
COMMUNICATION_SHRINKAGE = {**SHRINKAGE, "job": 1.0}
"""The same for communication, which differs from plan to plan."""

Key = tuple[str, int, str]
"""Kind of plan, ranks, model that a factor is for; empty where it is for all."""


@dataclass(frozen=True, slots=True)
class _Residual:
    """The logarithm of a run's ratio, less the levels fitted so far."""

    run: ObservedRun
    value: float
    weight: float
    transfer_weight: float
    """Its weight for other models and plans: less if the part is small here."""

    @property
    def for_all_plans(self) -> tuple[float, float]:
        """(value, weight) for other plans."""
        return self.value * self.run.transfer_share, self.transfer_weight


def fit_corrections(runs: Sequence[ObservedRun]) -> Corrections:
    """The factors of some runs. Runs of one precision say nothing about another."""
    factors: list[CorrectionFactor] = []
    ordered = sorted(runs, key=lambda r: r.when, reverse=True)
    for precision in sorted({r.precision for r in ordered}):
        some = [r for r in ordered if r.precision == precision]
        for part in PARTS:
            factors += _factors(part, precision, some)
    return Corrections(tuple(factors))


def _factors(part: str, precision: str, runs: list[ObservedRun]) -> list[CorrectionFactor]:
    """All levels of one part, one after the other."""
    residuals = _residuals(part, runs)
    drift = math.sqrt(statistics.mean((r.drift * r.noise_share) ** 2 for r in runs))
    shrinkage = SHRINKAGE if part in COMPUTE else COMMUNICATION_SHRINKAGE
    factors: list[CorrectionFactor] = []
    for level, key_of in _LEVELS.items():
        fitted: dict[Key, float] = {}
        for key in dict.fromkeys(key_of(x.run) for x in residuals):
            some = [x for x in residuals if key_of(x.run) == key]
            mean, n = _MEANS[level](some)
            doubt = _doubt(mean, some, drift) * (n if level in SHARED_LEVELS else 1.0)
            fitted[key] = mean * n / (n + shrinkage[level] + doubt)
            kind, ranks, job = key
            value = bounded(math.exp(fitted[key]))
            factors.append(CorrectionFactor(part, value, precision, kind, ranks, job, len(some)))
        residuals = [replace(x, value=x.value - fitted[key_of(x.run)]) for x in residuals]
    return factors


def _doubt(mean: float, some: list[_Residual], drift: float) -> float:
    """How many such runs are needed to move by half of their mean.

    A mean that is small relative to the noise of a shared machine is mostly noise; a large one is a model error.
    """
    noise = math.hypot(RUN_NOISE * statistics.median(x.run.spread * x.run.noise_share for x in some), drift)
    return (noise / mean) ** 2 if noise < MOST_NOISE * abs(mean) else MOST_NOISE**2


_LEVELS: dict[str, Callable[[ObservedRun], Key]] = {
    "machine": lambda r: ("", 0, ""),
    "job": lambda r: ("", 0, r.job),
    "kind": lambda r: (r.kind, r.ranks, ""),
    "own": lambda r: (r.kind, r.ranks, r.job),
}


def _residuals(part: str, runs: list[ObservedRun]) -> list[_Residual]:
    """The runs that have this part, newest first, each with its weight."""
    ages: dict[Key, int] = {}
    residuals = []
    for run in runs:
        if run.share(part) <= 0:
            continue
        ratio, key = run.ratios()[part], _LEVELS["own"](run)
        age = ages[key] = ages.get(key, -1) + 1
        weight = AGE_DECAY**age * min(1.0, run.steps / FEW_STEPS)
        weight *= min(1.0, LARGE_SPREAD / max(LARGE_SPREAD, run.spread))
        transfer_weight = weight * min(1.0, run.share(part) / SMALL_SHARE)
        residuals.append(_Residual(run, math.log(ratio), weight, transfer_weight))
    return residuals


def _by_model(pairs_of: Callable[[_Residual], tuple[float, float]], some: list[_Residual]) -> tuple[float, float]:
    """(mean, total weight): each model once, with the weight of its most certain run."""
    pairs = []
    for job in dict.fromkeys(x.run.job for x in some):
        own = [pairs_of(x) for x in some if x.run.job == job]
        pairs.append((_clipped_mean(own), max(w for _, w in own)))
    return _by_run(pairs)


def _by_run(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return _clipped_mean(pairs), sum(w for _, w in pairs)


_MEANS: dict[str, Callable[[list[_Residual]], tuple[float, float]]] = {
    "machine": lambda some: _by_model(lambda x: x.for_all_plans, some),
    "job": lambda some: _by_run([x.for_all_plans for x in some]),
    "kind": lambda some: _by_model(lambda x: (x.value, x.transfer_weight), some),
    "own": lambda some: _by_run([(x.value, x.weight) for x in some]),
}
"""By level: (mean, total weight) of some residuals."""


def _clipped_mean(pairs: list[tuple[float, float]]) -> float:
    """The weighted mean of values clipped to OUTLIER around the median."""
    middle = _median(pairs)
    clipped = [(min(middle + OUTLIER, max(middle - OUTLIER, v)), w) for v, w in pairs]
    return sum(v * w for v, w in clipped) / sum(w for _, w in clipped)


def _median(pairs: list[tuple[float, float]]) -> float:
    """The weighted median; the middle of two values of the same weight."""
    half, total = sum(w for _, w in pairs) / 2, 0.0
    ordered = sorted(pairs)
    for i, (value, weight) in enumerate(ordered):
        total += weight
        if math.isclose(total, half) and i + 1 < len(ordered):
            return (value + ordered[i + 1][0]) / 2
        if total > half:
            return value
    return ordered[-1][0]
