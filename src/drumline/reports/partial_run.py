"""A run folder that is broken or half-written: whatever of it can be read, and a line for each thing that cannot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..clusters.spec import Cluster
from ..core import files
from ..core.errors import CorruptFile, DrumlineError, InputError
from ..core.regular_files import sha256
from ..core.timeline import Timeline
from ..costs.estimate import Estimate
from ..models.profile import Profile
from ..planner.answer import Answer
from ..plans.plan import Plan
from .run import HEAD, Run, RunHead, check_folder, check_format, runs_inside
from .step_records import STEPS, StepRecord, complete_steps

T = TypeVar("T")
_REQUIRED = ("cluster.toml", "profile.json", "plan.toml", "estimate.json", "predicted.json", STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRun:
    """The readable part of a run folder."""

    folder: Path
    facts: Mapping[str, Any]
    """The fields of run.json that have the right type."""
    plan: Plan | None = None
    cluster: Cluster | None = None
    profile: Profile | None = None
    estimate: Estimate | None = None
    answer: Answer | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    steps: tuple[StepRecord, ...] = ()
    problems: tuple[str, ...] = ()
    """Missing or damaged parts, a line each."""

    @property
    def name(self) -> str:
        """Name of the run, or else of its folder."""
        return str(self.facts.get("name") or self.folder.resolve().name)

    @property
    def run(self) -> Run | None:
        """The run, if all is there that its page needs; what run.json lacks is empty."""
        plan, cluster, profile = self.plan, self.cluster, self.profile
        estimate, predicted = self.estimate, self.predicted
        if plan is None or cluster is None or profile is None or estimate is None or predicted is None:
            return None
        known = {k: v for k, v in self.facts.items() if k not in ("format", "files")}
        defaults = {
            "name": self.name,
            "job": "not recorded",
            "digest": "",
            "command": (),
            "started": "",
            "machine": "not recorded",
            "versions": {},
            "ranks": plan.ranks,
            "device": cluster.device.kind,
            "batch_size": profile.batch_size,
            "step_seconds": statistics.median(s.seconds for s in self.steps) if self.steps else 0.0,
        }
        return Run(
            **{**defaults, **known},
            plan=plan,
            cluster=cluster,
            profile=profile,
            estimate=estimate,
            predicted=predicted,
            answer=self.answer,
            measured=self.measured,
            steps=self.steps,
            folder=self.folder,
        )


def read_partial(folder: str | Path) -> PartialRun:
    """Read what there is. Refuses what is no run folder; raises `CorruptFile` if nothing in it can be shown."""
    folder = Path(folder)
    check_folder(folder)
    reader = _Reader(folder)
    facts = reader.head()
    parts: dict[str, Any] = {
        "plan": reader.part("plan.toml", Plan.load),
        "cluster": reader.part("cluster.toml", Cluster.load),
        "profile": reader.part("profile.json", Profile.load),
        "estimate": reader.part("estimate.json", Estimate.load),
        "answer": reader.part("answer.json", Answer.load),
        "predicted": reader.part("predicted.json", Timeline.load),
        "measured": reader.part("measured.json", Timeline.load),
    }
    steps = reader.steps()
    reader.problems += _missing_line(reader.missing)
    if not (steps or any(parts.values()) or len(facts) > 1):
        raise _nothing(folder, reader.problems)
    return PartialRun(folder=folder, facts=facts, **parts, steps=steps, problems=tuple(reader.problems))


def _nothing(folder: Path, problems: list[str]) -> DrumlineError:
    inside = runs_inside(folder)
    if inside:
        return InputError(
            f"{folder} is not a run", rule=f"a run folder has {HEAD}", fix=f"runs inside it: {', '.join(inside[:5])}"
        )
    empty = not any(folder.iterdir())
    rule = "the folder is empty" if empty else "; ".join(problems)
    return CorruptFile(f"nothing in {folder} can be shown", where=str(folder), rule=rule, fix="drumline train JOB")


@dataclass(slots=True)
class _Reader:
    """Reads one file after the other and keeps what went wrong."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that are not there."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """As run.json lists them; empty if it cannot be read."""

    def head(self) -> dict[str, Any]:
        """The fields of run.json that can be used."""
        path = self.folder / HEAD
        if not path.exists():
            self.problems.append(f"{HEAD} is missing: the training has not ended, or was killed")
            return {}
        try:
            document = files.read_json(path)
        except DrumlineError as e:
            self.problems.append(_line(HEAD, e))
            return {}
        check_format(document, self.folder)
        if not isinstance(document, dict):
            self.problems.append(f"{HEAD} is damaged: it is not a table")
            return {}
        facts: dict[str, Any] = {}
        missing, wrong = [], []
        for f in dataclasses.fields(RunHead):
            if f.name not in document:
                optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
                missing += [] if optional else [f.name]
                continue
            try:
                facts[f.name] = TypeAdapter(get_type_hints(RunHead)[f.name]).validate_python(document[f.name])
            except ValidationError:
                wrong.append(f.name)
        self.problems += [f"{HEAD} has no {', '.join(missing)}"] if missing else []
        self.problems += [f"{HEAD} has wrong values: {', '.join(wrong)}"] if wrong else []
        self.digests = facts.get("files", {})
        return facts

    def part(self, name: str, read: Callable[[Path], T]) -> T | None:
        """One file, or None and the reason."""
        path = self.folder / name
        if not path.exists():
            if name in self.digests or name in _REQUIRED:
                self.missing.append(name)
            return None
        try:
            value = read(path)
        except DrumlineError as e:
            self.problems.append(_line(name, e))
            return None
        self._compare(name, path)
        return value

    def steps(self) -> tuple[StepRecord, ...]:
        """The lines of steps.jsonl that can be read."""
        result = self.part(STEPS, complete_steps)
        if result is None:
            return ()
        records, bad, first = result
        if bad:
            lines = "1 line is" if bad == 1 else f"{bad} lines are"
            self.problems.append(f"{STEPS}: {lines} damaged and left out, the first is line {first}")
        return records

    def _compare(self, name: str, path: Path) -> None:
        if name in self.digests and sha256(path) != self.digests[name]:
            self.problems.append(f"{name} is not as the run wrote it: its sha256 differs")


def _missing_line(names: list[str]) -> list[str]:
    """One line about all files that are not there."""
    if len(names) < 2:
        return [f"{name} is missing" for name in names]
    return [f"{', '.join(names[:-1])} and {names[-1]} are missing"]


def _line(name: str, e: DrumlineError) -> str:
    """One line about a file that cannot be read."""
    reason = e.rule or e.what
    return f"{name} {'is damaged' if e.rule else 'cannot be read'}: {reason.splitlines()[0][:200]}"
