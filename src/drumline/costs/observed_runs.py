"""Runs on this machine, predicted and measured, and the file that keeps them next to the cluster file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..clusters.measured import STRICT
from ..core import files
from ..core.errors import CorruptFile, InputError
from ..core.regular_files import sha256
from ..models.profile import Profile
from ..plans import Plan
from .corrections import CORRECTED_AS, FULLY_SHARDED, ONE, REPLICAS, SHARDED, bounded, model_digest, plan_kind
from .estimate import Estimate

FORMAT = 1
"""Version of the file; later ones are refused."""
KEPT_RUNS = 60
"""Runs that the file keeps."""

PARTS = ("forward", "backward", "optimizer", "communication")
COMPUTE = ("forward", "backward", "optimizer")
"""Parts that a machine executes in the same way under every plan."""

_SEPARATE = (("forward",), ("backward",), ("optimizer",), ("communication",))
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    ONE: _SEPARATE,
    REPLICAS: _SEPARATE,
    SHARDED: _SEPARATE,
    FULLY_SHARDED: (("optimizer",), ("forward", "backward", "communication")),
}
"""Parts that the clock of a phase separates, by kind of plan; it separates none for other kinds. The last group is the
remainder of the step."""

REFERENCE_SECONDS, LENGTH_POWER = 9.0, 0.25
"""A run longer than the first (seconds) has less noise, by this power of its length: runs on shared cores,
docs/calibration.md. With a larger power, long runs count as more certain."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """One run: seconds of a step by part, predicted without corrections and measured."""

    __pydantic_config__ = STRICT
    when: str
    """ISO 8601."""
    job: str
    """The digest of the model."""
    name: str
    """The name of the model."""
    kind: str
    """The kind of plan."""
    ranks: Annotated[int, Field(ge=1)]
    precision: str
    torch: str
    measurement: str
    """The digest of the cluster file that it was predicted with."""
    steps: Annotated[int, Field(ge=1)]
    """Counted, after warm-up."""
    predicted: dict[str, Amount]
    measured: dict[str, Amount]
    """By phase, as far as the clock separates phases."""
    step_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Measured."""
    spread: Amount = 0.0
    """Of its steps: half of the interquartile range over the median."""
    drift: Amount = 0.0
    """Change of the machine's speed during the run, in either direction, as a logarithm."""

    def ratios(self) -> dict[str, float]:
        """Measured over predicted, by part; with them the parts add up to the measured step, as far as bounds allow."""
        groups, left = GROUPS.get(self.kind, (PARTS,)), self.step_seconds
        ratios: dict[str, float] = {}
        for i, group in enumerate(groups):
            expected = sum(self.expected(p) for p in group)
            seconds = left if i == len(groups) - 1 else min(left, sum(self.measured.get(p, 0.0) for p in group))
            left -= seconds
            ratio = bounded(seconds / expected) if expected > 0 and seconds > 0 else 1.0
            ratios |= dict.fromkeys(group, ratio)
        total = sum(self.expected(p) * ratios[p] for p in PARTS)
        rest = self.step_seconds / total if total > 0 else 1.0
        return {p: bounded(ratios[p] * rest) for p in PARTS}

    def expected(self, part: str) -> float:
        """The predicted seconds of a part, and of those that are corrected like it."""
        return sum(seconds for p, seconds in self.predicted.items() if CORRECTED_AS.get(p, p) == part)

    def share(self, *parts: str) -> float:
        """The share of some parts in the predicted step."""
        total = sum(self.predicted.values())
        return sum(map(self.expected, parts)) / total if total > 0 else 0.0

    @property
    def noise_share(self) -> float:
        """The share of the machine's noise that is left in it: a long run averages over more of it.

        Noise that lasts for minutes stays, so this falls more slowly than a square root.
        """
        return math.pow(min(1.0, REFERENCE_SECONDS / (self.steps * self.step_seconds)), LENGTH_POWER)

    @property
    def transfer_share(self) -> float:
        """How much of its ratios applies to other plans: all if the clock separates the parts, else that of compute."""
        return 1.0 if GROUPS.get(self.kind) == _SEPARATE else self.share(*COMPUTE)


def observed_run(
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
) -> ObservedRun:
    """A run from its uncorrected estimate at the current speed, and each rank's own seconds by phase.

    `each` are the seconds of the counted steps.
    """
    names = [p for p in COMPUTE if any(p in rank for rank in phases)]
    mean = {p: sum(rank.get(p, 0.0) for rank in phases) / len(phases) for p in names}
    return ObservedRun(
        when=when,
        job=model_digest(profile),
        name=profile.name,
        kind=plan_kind(plan),
        ranks=plan.ranks,
        precision=plan.precision,
        torch=torch,
        measurement=measurement,
        steps=len(each),
        predicted={k: v for k, v in raw.parts.items() if v > 0},
        measured=mean,
        step_seconds=step_seconds,
        spread=_spread(each),
        drift=drift,
    )


def _spread(each: Sequence[float]) -> float:
    if len(each) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle > 0 else 0.0


# -- the file


@dataclass(frozen=True, slots=True)
class _RunsFile:
    __pydantic_config__ = STRICT
    format: int
    runs: tuple[ObservedRun, ...]


def corrections_file(cluster: str | Path) -> Path:
    """Where the runs of a cluster file are kept: `NAME.corrections.json` for `NAME.toml`."""
    path = Path(cluster)
    return path.with_name(f"{path.stem if path.suffix == '.toml' else path.name}.corrections.json")


def cluster_digest(cluster: str | Path) -> str:
    """The digest of a cluster file: a new measurement invalidates the runs of the old one."""
    return sha256(cluster)[:16]


def read_runs(path: str | Path) -> tuple[ObservedRun, ...]:
    """The runs of a file; none if it does not exist. Raises for a damaged file, or one of a later version."""
    if not Path(path).exists():
        return ()
    document = files.read_json(path)
    version = document.get("format") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise InputError(
            f"{path} was written by a later drumline",
            where=str(path),
            rule=f"format {version}; this one reads up to {FORMAT}",
            fix="pip install --upgrade drumline",
        )
    try:
        return files.from_plain(_RunsFile, document, str(path), CorruptFile).runs
    except CorruptFile as e:
        raise CorruptFile(
            f"{path} is damaged",
            where=e.where,
            rule=f"{e.what}: {e.rule}" if e.rule else e.what,
            fix="drumline measure --forget removes it",
        ) from None


def usable_runs(runs: Iterable[ObservedRun], *, measurement: str, torch: str) -> tuple[ObservedRun, ...]:
    """The runs of this measurement of the machine, and of this torch."""
    return tuple(r for r in runs if (r.measurement, r.torch) == (measurement, torch))


def add_run(path: str | Path, run: ObservedRun) -> int:
    """Add a run and drop those of another measurement; returns how many there are. Replaces a damaged file."""
    try:
        earlier = read_runs(path)
    except CorruptFile:
        earlier = ()
    kept = [r for r in earlier if r.measurement == run.measurement][-(KEPT_RUNS - 1) :]
    files.write_json(path, _RunsFile(FORMAT, (*kept, run)))
    return len(kept) + 1


def remove_runs(path: str | Path) -> bool:
    """Remove the file; whether there was one."""
    try:
        Path(path).unlink()
    except FileNotFoundError:
        return False
    except OSError as e:
        raise InputError(f"{path} cannot be removed: {e.strerror}") from None
    return True
