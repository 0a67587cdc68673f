"""Learns corrections from runs: what was measured of each part of a step against what was predicted.

Four levels of factors, from the general to the special, each learnt from what the ones before it leave over: the
machine, the model, the kind of plan, the model under that kind of plan. What one run shows is first taken to hold for
all plans: otherwise a plan would win because it has never been tried. Where few models speak, the machine's factors are
pulled towards 1. The last level makes the next run of the same model right.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from ..clusters.corrections import CorrectionFactor, Corrections
from ..clusters.measured import STRICT
from ..models.profile import Profile
from ..plans import Plan
from .corrections import ALIKE, FULLY_SHARDED, ONE, REPLICAS, SHARDED, bounded, job_of, kind_of
from .estimate import Estimate

PARTS = ("forward", "backward", "optimizer", "communication")
COMPUTE = ("forward", "backward", "optimizer")
"""What a machine does in the same way under every plan."""

_CLEAN = (("forward",), ("backward",), ("optimizer",), ("communication",))
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    ONE: _CLEAN,
    REPLICAS: _CLEAN,
    SHARDED: _CLEAN,
    FULLY_SHARDED: (("optimizer",), ("forward", "backward", "communication")),
}
"""Parts that can be told apart by the clock of a phase; under other kinds none. The last group is what remains."""

FADES = 0.6
"""The weight of a run against the next newer one of the same model and kind of plan."""
FEW_STEPS = 10
"""A run with fewer counted steps than this weighs less."""
UNEASY = 0.1
"""A run whose steps spread by more than this weighs less: something else was going on."""
BETWEEN_STEPS = 2.0
"""How far one run is from the next of the same job, in spreads of its steps; the drift of the pace comes on top."""
LASTING, SETTLES = 9.0, 0.25
"""That is of runs of so many seconds; and by which power of its length a longer run is nearer to the next one. By runs
on shared cores: docs/calibration.md."""
NEVER = 1e3
"""Noise that is larger by this than what runs say leaves nothing of it."""
SHARED = ("machine", "kind")
"""Levels at which several models speak. Their runs were made in the same minutes, so that more of them do not make the
noise of the machine smaller."""
SMALL = 0.1
"""A part with a smaller share of the step weighs less: its clock tells little."""
OUTLIER = math.log(1.5)
"""How far from the middle a run can pull."""
KEPT_BACK = {"machine": 0.5, "job": 0.02, "kind": 1.0, "own": 0.1}
"""n runs (models, where all of them speak) move a level by the share n / (n + this)."""
KEPT_BACK_MESSAGES = {**KEPT_BACK, "job": 1.0}
"""The same for communication, of which plans have each their own."""

Key = tuple[str, int, str]
"""Kind of plan, ranks, model: what a factor is for; empty where it is for all."""
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Observed:
    """One run: seconds of a step by part, predicted without corrections and measured."""

    __pydantic_config__ = STRICT
    when: str
    """ISO 8601."""
    job: str
    """The digest of the model."""
    name: str
    """What a person calls it."""
    kind: str
    ranks: Annotated[int, Field(ge=1)]
    precision: str
    torch: str
    measurement: str
    """The digest of the cluster file that it was predicted with."""
    steps: Annotated[int, Field(ge=1)]
    """Counted, after warm-up."""
    predicted: dict[str, Amount]
    measured: dict[str, Amount]
    """By phase, as far as phases can be told apart."""
    step_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Measured."""
    spread: Amount = 0.0
    """Of its steps: half of the interquartile range over the median."""
    drift: Amount = 0.0
    """How far the pace of the machine moved during it, either way, as a logarithm."""

    def ratios(self) -> dict[str, float]:
        """Measured over predicted, by part; with them the parts add up to the measured step, as far as bounds allow."""
        groups, left = GROUPS.get(self.kind, (PARTS,)), self.step_seconds
        found: dict[str, float] = {}
        for i, group in enumerate(groups):
            expected = sum(self.expected(p) for p in group)
            seconds = left if i == len(groups) - 1 else min(left, sum(self.measured.get(p, 0.0) for p in group))
            left -= seconds
            ratio = bounded(seconds / expected) if expected > 0 and seconds > 0 else 1.0
            found |= dict.fromkeys(group, ratio)
        total = sum(self.expected(p) * found[p] for p in PARTS)
        rest = self.step_seconds / total if total > 0 else 1.0
        return {p: bounded(found[p] * rest) for p in PARTS}

    def expected(self, part: str) -> float:
        """The predicted seconds of a part and of what is corrected as it is."""
        return sum(seconds for p, seconds in self.predicted.items() if ALIKE.get(p, p) == part)

    def share(self, *parts: str) -> float:
        """How much of the predicted step some parts are."""
        total = sum(self.predicted.values())
        return sum(map(self.expected, parts)) / total if total > 0 else 0.0

    @property
    def moment(self) -> float:
        """The share of what comes and goes on a machine that is still in it: a long run has the mean of much of it. Of
        what comes and goes over minutes it has all: so it is no square root."""
        return math.pow(min(1.0, LASTING / (self.steps * self.step_seconds)), SETTLES)

    @property
    def common(self) -> float:
        """How much of its ratios is about parts, and not about its plan: all where the clock tells the parts apart."""
        return 1.0 if GROUPS.get(self.kind) == _CLEAN else self.share(*COMPUTE)


def observe(
    profile: Profile,
    plan: Plan,
    raw: Estimate,
    *,
    step_seconds: float,
    phases: Sequence[Mapping[str, float]],
    each: Sequence[float],
    when: str,
    torch: str,
    measurement: str,
    drift: float = 0.0,
) -> Observed:
    """From a run: its uncorrected estimate at the speed of the moment, and each rank's own seconds by phase.

    `each` are the seconds of the steps that count.
    """
    names = [p for p in COMPUTE if any(p in rank for rank in phases)]
    mean = {p: sum(rank.get(p, 0.0) for rank in phases) / len(phases) for p in names}
    return Observed(
        when,
        job_of(profile),
        profile.name,
        kind_of(plan),
        plan.ranks,
        plan.precision,
        torch,
        measurement,
        len(each),
        {k: v for k, v in raw.parts.items() if v > 0},
        mean,
        step_seconds,
        _spread(each),
        drift,
    )


def _spread(each: Sequence[float]) -> float:
    if len(each) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Left:
    """What the levels so far leave over of one run's ratio, as a logarithm."""

    run: Observed
    value: float
    weight: float
    abroad: float
    """Its weight for other models and plans: less where the part is a small one here."""

    @property
    def to_all(self) -> tuple[float, float]:
        """(value, weight) where other plans are concerned."""
        return self.value * self.run.common, self.abroad


def learnt(runs: Sequence[Observed]) -> Corrections:
    """The factors that runs teach. Runs of different precisions teach nothing about each other."""
    factors: list[CorrectionFactor] = []
    ordered = sorted(runs, key=lambda r: r.when, reverse=True)
    for precision in sorted({r.precision for r in ordered}):
        some = [r for r in ordered if r.precision == precision]
        for part in PARTS:
            factors += _factors(part, precision, some)
    return Corrections(tuple(factors))


def _factors(part: str, precision: str, runs: list[Observed]) -> list[CorrectionFactor]:
    """All levels of one part, one after the other."""
    left = _weighted(part, runs)
    drift = math.sqrt(statistics.mean((r.drift * r.moment) ** 2 for r in runs))
    back = KEPT_BACK if part in COMPUTE else KEPT_BACK_MESSAGES
    found: list[CorrectionFactor] = []
    for name, key_of in _LEVELS.items():
        taken: dict[Key, float] = {}
        for key in dict.fromkeys(key_of(x.run) for x in left):
            mine = [x for x in left if key_of(x.run) == key]
            centre, n = _SPOKEN[name](mine)
            doubt = _doubt(centre, mine, drift) * (n if name in SHARED else 1.0)
            taken[key] = centre * n / (n + back[name] + doubt)
            kind, ranks, job = key
            found.append(CorrectionFactor(part, bounded(math.exp(taken[key])), precision, kind, ranks, job, len(mine)))
        left = [replace(x, value=x.value - taken[key_of(x.run)]) for x in left]
    return found


def _doubt(centre: float, some: list[_Left], drift: float) -> float:
    """How many runs like these it takes to believe half of what they say: of what is small against the noise of a
    shared machine, most is that noise, and the next run will have its own; what is large is the price's fault."""
    noise = math.hypot(BETWEEN_STEPS * statistics.median(x.run.spread * x.run.moment for x in some), drift)
    return (noise / centre) ** 2 if noise < NEVER * abs(centre) else NEVER**2


_LEVELS: dict[str, Callable[[Observed], Key]] = {
    "machine": lambda r: ("", 0, ""),
    "job": lambda r: ("", 0, r.job),
    "kind": lambda r: (r.kind, r.ranks, ""),
    "own": lambda r: (r.kind, r.ranks, r.job),
}


def _weighted(part: str, runs: list[Observed]) -> list[_Left]:
    """The runs that have this part, newest first, each with its weight."""
    seen: dict[Key, int] = {}
    found = []
    for run in runs:
        if run.share(part) <= 0:
            continue
        ratio = run.ratios()[part]
        age = seen[_LEVELS["own"](run)] = seen.get(_LEVELS["own"](run), -1) + 1
        weight = FADES**age * min(1.0, run.steps / FEW_STEPS) * min(1.0, UNEASY / max(UNEASY, run.spread))
        found.append(_Left(run, math.log(ratio), weight, weight * min(1.0, run.share(part) / SMALL)))
    return found


def _by_job(pairs_of: Callable[[_Left], tuple[float, float]], some: list[_Left]) -> tuple[float, float]:
    """(the centre, how many speak): each model once, with its surest run's weight."""
    pairs = []
    for job in dict.fromkeys(x.run.job for x in some):
        mine = [pairs_of(x) for x in some if x.run.job == job]
        pairs.append((_held(mine), max(w for _, w in mine)))
    return _held(pairs), sum(w for _, w in pairs)


def _by_run(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return _held(pairs), sum(w for _, w in pairs)


_SPOKEN: dict[str, Callable[[list[_Left]], tuple[float, float]]] = {
    "machine": lambda some: _by_job(lambda x: x.to_all, some),
    "job": lambda some: _by_run([x.to_all for x in some]),
    "kind": lambda some: _by_job(lambda x: (x.value, x.abroad), some),
    "own": lambda some: _by_run([(x.value, x.weight) for x in some]),
}
"""Who speaks at a level, and with what weight."""


def _held(pairs: list[tuple[float, float]]) -> float:
    """A weighted mean in which nobody pulls from beyond OUTLIER of the median."""
    middle = _median(pairs)
    held = [(min(middle + OUTLIER, max(middle - OUTLIER, v)), w) for v, w in pairs]
    return sum(v * w for v, w in held) / sum(w for _, w in held)


def _median(pairs: list[tuple[float, float]]) -> float:
    """The weighted median; between the two middle values where they weigh the same."""
    half, total = sum(w for _, w in pairs) / 2, 0.0
    ordered = sorted(pairs)
    for i, (value, weight) in enumerate(ordered):
        total += weight
        if math.isclose(total, half) and i + 1 < len(ordered):
            return (value + ordered[i + 1][0]) / 2
        if total > half:
            return value
    return ordered[-1][0]
