"""The `Run` value: one training with its inputs, its prediction and its measurements; and the run folder."""

from __future__ import annotations

import dataclasses
import os
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict

from ..clusters.spec import Cluster
from ..core import files
from ..core.display import NotebookValue
from ..core.errors import CorruptFile, InputError, nearest
from ..core.regular_files import sha256
from ..core.timeline import Timeline
from ..costs.estimate import Estimate, Throughput
from ..models.profile import Profile
from ..planner.answer import Answer
from ..plans.plan import Plan
from .split_summary import SplitSummary
from .step_records import STEPS, StepRecord, finite, read_steps, step_line

T = TypeVar("T")

FORMAT = 1
"""Version of the folder; a later one is refused."""

WARM_STEPS = 2
"""Steps whose wait for data does not count where there are others: it is loaded while everything starts."""

HEAD = "run.json"
"""Written last: a folder without it is not a complete run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(NotebookValue):
    """One training: inputs, prediction, measurements."""

    name: str
    job: str
    """Where the job is defined, such as `examples/gpt.py:job`."""
    digest: str
    """Digest of the job's file."""
    command: tuple[str, ...]
    """As it was typed; the values of secrets (token, key, password, ...) are blanked."""
    started: str
    """ISO 8601."""
    machine: str
    """One line."""
    versions: dict[str, str]
    ranks: int
    device: str
    batch_size: int
    """Samples per optimizer step, over all ranks."""
    plan: Plan
    cluster: Cluster
    profile: Profile
    estimate: Estimate
    predicted: Timeline
    answer: Answer | None = None
    """The search; none if the plan was given and not compared."""
    steps: tuple[StepRecord, ...] = ()
    measured: Timeline | None = None
    """One recorded step; none if none was recorded."""
    step_seconds: float = 0.0
    """Median of the steps after warm-up; 0 if there was none."""
    peak_bytes: float = 0.0
    """Peak of live tensors on the fullest rank; 0 if not measured."""
    memory_parts: dict[str, float] = field(default_factory=dict)
    """The measured peak by `parameters`, `gradients`, `optimizer`, `activations`, `communication`, `other`."""
    evaluation: dict[str, float] = field(default_factory=dict)
    division: SplitSummary | None = None
    """How the plan split the model, and the bubble of its pipeline; none if it splits nothing."""
    faults: tuple[str, ...] = ()
    """The faults that it survived, in order."""
    gradients: dict[str, int] = field(default_factory=dict)
    """Gradients of workers by outcome: `applied`, `dropped` (too late), `lost` (with a failed worker), and
    `repeated` (updates made again after a parameter server failed). Empty for other plans."""
    failure: str = ""
    """Why it ended before its last step; empty if it did not, or was asked to."""
    folder: Path | None = field(default=None, compare=False)
    """Where it is saved."""

    def __post_init__(self) -> None:
        # A secret that never enters the value cannot leak from its files or its page.
        object.__setattr__(self, "command", without_secrets(self.command))

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [s.loss for s in self.steps]

    @property
    def predicted_step_seconds(self) -> float:
        """The predicted step time."""
        return self.estimate.step_seconds

    @property
    def throughput(self) -> Throughput | None:
        """Throughput of the median step with its wait for data; None if none was measured."""
        samples = round(statistics.median(s.samples for s in self.steps)) if self.steps else self.batch_size
        busy = max(1e-6, 1.0 - self.data_share)
        return Throughput.of(self.profile, self.plan, self.cluster, self.step_seconds / busy, samples=samples)

    @property
    def data_share(self) -> float:
        """The median share of a step's time that was spent waiting for data."""
        shares = [s.data_share for s in self.steps]
        return statistics.median(shares[WARM_STEPS:] or shares) if shares else 0.0

    @property
    def time_error(self) -> float | None:
        """(predicted - measured) / measured step time; below zero the prediction was too fast. None: not measured."""
        return _error(self.estimate.step_seconds, self.step_seconds)

    @property
    def memory_error(self) -> float | None:
        """(predicted - measured) / measured peak memory; below zero it was too low. None: not measured."""
        return _error(self.estimate.memory_bytes, self.peak_bytes)

    def save(self, folder: str | Path) -> Path:
        """Write the run folder; an earlier run in it is replaced, other files are left alone."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file", rule="a run is written to a folder", fix="give another name")
        _remove(folder / HEAD)
        writers: dict[str, Callable[[Path], None] | None] = {
            "cluster.toml": self.cluster.save,
            "profile.json": self.profile.save,
            "plan.toml": self.plan.save,
            "estimate.json": self.estimate.save,
            "answer.json": self.answer.save if self.answer else None,
            STEPS: lambda path: files.write_text(path, "".join(map(step_line, self.steps))),
            "predicted.json": self.predicted.save,
            "measured.json": self.measured.save if self.measured else None,
        }
        for name, write in writers.items():
            if write:
                write(folder / name)
            else:
                _remove(folder / name)
        sums = {name: sha256(folder / name) for name, write in writers.items() if write}
        values = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(RunHead) if f.name not in ("format", "files")
        }
        files.write_json(folder / HEAD, finite({"format": FORMAT, **values, "files": sums}))
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read a run folder; a damaged file is refused by name."""
        folder = Path(folder)
        head = _read_head(folder)
        for name in ("cluster.toml", "profile.json", "plan.toml", "estimate.json", STEPS, "predicted.json"):
            if name not in head.files:
                raise CorruptFile(f"{folder / HEAD} is damaged", where=str(folder / HEAD), rule=f"it lists no {name}")
        for name, written in head.files.items():
            _check(folder, name, written)
        values = {f.name: getattr(head, f.name) for f in dataclasses.fields(head) if f.name not in ("format", "files")}

        def part(name: str, read: Callable[[Path], T]) -> T:
            return _damaged(folder / name, read)

        return cls(
            **values,
            cluster=part("cluster.toml", Cluster.load),
            profile=part("profile.json", Profile.load),
            plan=part("plan.toml", Plan.load),
            estimate=part("estimate.json", Estimate.load),
            answer=part("answer.json", Answer.load) if "answer.json" in head.files else None,
            steps=part(STEPS, read_steps),
            predicted=part("predicted.json", Timeline.load),
            measured=part("measured.json", Timeline.load) if "measured.json" in head.files else None,
            folder=folder,
        )


def without_secrets(command: Iterable[str]) -> tuple[str, ...]:
    """A command with the values of secret options, and passwords in URLs, blanked."""
    words: list[str] = []
    blank_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        if blank_next and not word.startswith("-"):
            words.append(_BLANK)
        elif equals and _is_secret(name):
            words.append(f"{name}={_BLANK}")
        else:
            words.append(_ADDRESS.sub(rf"\1{_BLANK}@", word))
        blank_next = not equals and word.startswith("-") and _is_secret(word)
    return tuple(words)


_BLANK = "***"
_ADDRESS = re.compile(r"(://)[^/@\s]+@")
_SECRET = {"key", "keys", "apikey", "token", "pass", "passwd", "password", "passphrase", "secret", "credentials"}


def _is_secret(name: str) -> bool:
    return not _SECRET.isdisjoint(re.split(r"[-_.]+", name.lower()))


@dataclass(frozen=True, slots=True)
class RunHead:
    """The contents of run.json: the scalars of a run, and the digests of the other files."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    format: int
    name: str
    job: str
    digest: str
    command: tuple[str, ...]
    started: str
    machine: str
    versions: dict[str, str]
    ranks: int
    device: str
    batch_size: int
    step_seconds: float
    peak_bytes: float
    memory_parts: dict[str, float]
    evaluation: dict[str, float]
    files: dict[str, str]
    division: SplitSummary | None = None
    gradients: dict[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    failure: str = ""


def check_folder(folder: Path) -> None:
    """Refuse what is no folder."""
    if folder.is_dir():
        return
    near = nearest(folder.name, [p.name for p in folder.parent.iterdir()]) if folder.parent.is_dir() else ""
    if folder.is_file():
        raise InputError(f"{folder} is a file, not a run folder", fix=f"give its folder: {folder.parent}")
    raise InputError(f"no run at {folder}", rule="a run is a folder that `drumline train` wrote", fix=near)


def runs_inside(folder: Path) -> list[str]:
    """The names of the run folders in a folder."""
    return sorted(p.parent.name for p in folder.glob(f"*/{HEAD}"))


def _read_head(folder: Path) -> RunHead:
    path = folder / HEAD
    check_folder(folder)
    if not path.is_file():
        inside = runs_inside(folder)
        raise InputError(
            f"{folder} is not a run",
            rule=f"a run folder contains {HEAD}; this one does not (or its training has not ended)",
            fix=f"runs inside it: {', '.join(inside[:5])}" if inside else "drumline train JOB writes one",
        )
    document = _damaged(path, files.read_json)
    check_format(document, folder)
    return files.from_plain(RunHead, document, str(path), CorruptFile)


def check_format(document: object, folder: Path) -> None:
    """Refuse a run.json that a later version of this package wrote."""
    version = document.get("format") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise InputError(
            f"{folder} was written by a later drumline",
            where=str(folder / HEAD),
            rule=f"format {version}; this one reads up to {FORMAT}",
            fix="pip install --upgrade drumline",
        )


def _check(folder: Path, name: str, written: str) -> None:
    path = folder / name
    if Path(name).name != name:
        raise CorruptFile(f"{folder / HEAD} is damaged", where=str(folder / HEAD), rule=f"{name!r} is no file name")
    if not path.is_file():
        raise CorruptFile(f"{path} is missing", where=str(path), rule=f"{HEAD} lists it", fix="copy the whole folder")
    actual = _damaged(path, sha256)
    if actual != written:
        raise CorruptFile(
            f"{path} is damaged",
            where=str(path),
            rule=f"sha256 {written[:12]} was written, {actual[:12]} was read",
            fix="copy the folder again from where it ran",
        )


def _damaged(path: Path, read: Callable[[Path], T]) -> T:
    """Read one file of the folder: a program wrote it, so any error in it is damage."""
    try:
        return read(path)
    except InputError as e:
        if not os.access(path, os.R_OK):
            raise
        raise CorruptFile(f"{path} is damaged", where=e.where or str(path), rule=e.rule or e.what) from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}") from None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"{path} cannot be replaced: {e.strerror}") from None


def _error(predicted: float, measured: float) -> float | None:
    return (predicted - measured) / measured if measured > 0 else None
