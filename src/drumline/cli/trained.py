"""What a training leaves: what its ranks have told, and the run as a value, beside what was foreseen."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError

if TYPE_CHECKING:
    from ..core.job import Job
    from ..core.timeline import Span
    from ..reports import Run, StepRecord
    from .foreseen import Foreseen


@dataclass(frozen=True, slots=True)
class Trained:
    """What the ranks have told."""

    records: list[StepRecord]
    """One for each step."""
    results: list[dict[str, Any]]
    """What each rank has measured."""
    speed: float | None
    """How fast the machine was when they began, against when it was measured."""

    @property
    def first(self) -> dict[str, Any]:
        """The first rank's."""
        return self.results[0]

    @property
    def last_step(self) -> list[Span]:
        """As every rank recorded it, each by its own clock from its own start."""
        return [s for r in self.results for s in r["last"]]


def prepare(folder: Path, *, overwrite: bool) -> None:
    """Refuse a run folder before the training, not after it."""
    if (folder / "run.json").exists() and not overwrite:
        raise InputError(f"{folder} holds a run already", fix="--output with another name, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"{folder} cannot be a run folder: {e.strerror}", fix="--output with another name") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} cannot be written", fix="--output with another name")
    (folder / "run.json").unlink(missing_ok=True)  # the run that it tells of is about to be written over


def run_of(name: str, job: Job, seen: Foreseen, trained: Trained, earlier: Iterable[StepRecord]) -> Run:
    """The run; `earlier` are the steps of the one that it goes on from."""
    from ..core.timeline import Timeline
    from ..reports import Run
    from .corrections import timeline_of
    from .splitting import carried_out

    records, results, first, speed = trained.records, trained.results, trained.first, trained.speed
    predicted = seen.estimate if speed is None else seen.estimate.at_speed(speed)
    return Run(
        name=name,
        job=job.source,
        digest=job.digest,
        command=tuple(sys.argv),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        versions=_versions(),
        ranks=seen.plan.ranks,
        device=first["device"],
        batch_size=job.batch_size,
        plan=seen.plan,
        cluster=seen.cluster,
        profile=seen.profile,
        estimate=predicted,
        answer=seen.answer,
        steps=(*(s for s in earlier if s.step < records[0].step), *records),
        predicted=timeline_of(seen.profile, seen.plan, seen.cluster, predicted, speed or 1.0),
        measured=Timeline(
            "measured",
            tuple(s for r in results for s in r["spans"]),
            notes=(f"step {first['probed']}, recorded under the profiler, which slows it",),
        ),
        step_seconds=max(r["step_seconds"] for r in results),
        peak_bytes=max(r["peak_bytes"] for r in results),
        memory_parts=max(results, key=lambda r: r["peak_bytes"])["parts"],
        evaluation=first["evaluation"],
        division=carried_out(seen.profile, seen.plan, seen.cluster, results),
    )


def write_trace(path: str, trained: Trained) -> None:
    """The last step, for Perfetto."""
    from ..core import files
    from ..core.timeline import Timeline

    notes = (f"step {trained.records[-1].step}",)
    files.write_text(path, Timeline("measured", tuple(trained.last_step), notes=notes).to_chrome())


def _machine() -> str:
    from ..measurement.machine import cpu_name

    return f"{platform.node()}: {os.cpu_count()} x {cpu_name()}, {platform.system()} {platform.release()}"


def _versions() -> dict[str, str]:
    import torch

    from .. import __version__

    return {"drumline": __version__, "torch": torch.__version__, "python": platform.python_version()}
