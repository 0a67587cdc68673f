"""The outcome of a training: what its ranks reported, turned into a `Run` with its folder."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import DrumlineError, InputError
from .corrections import predicted_timeline
from .measured_timeline import measured_timeline
from .run_lock import lock_run

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.job import Job
    from ..core.timeline import Span
    from ..models import Profile
    from ..plans import Plan
    from ..reports import Run, StepRecord
    from ..reports.split_summary import SplitSummary
    from .forecast import Forecast


@dataclass(frozen=True, slots=True)
class RankReports:
    """The reports of the ranks of a training."""

    records: list[StepRecord]
    """One for each step."""
    results: list[dict[str, Any]]
    """One for each rank, at the end."""
    speed: float | None
    """The machine's speed at the start, relative to when it was measured."""
    faults: tuple[str, ...] = ()
    """The faults that were survived."""
    gradients: dict[str, int] = field(default_factory=dict)
    """Gradients of workers by outcome."""

    @property
    def first(self) -> dict[str, Any]:
        """The first rank's result."""
        return self.results[0]

    @property
    def last_step(self) -> list[Span]:
        """The last step as every rank recorded it, each by its own clock from its own start."""
        return [s for r in self.results for s in r["last"]]


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Create the run folder, or refuse it: before the training, not after it."""
    if not overwrite and has_ended_well(folder):
        raise InputError(f"{folder} already contains a run", fix="--output with another name, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"{folder} cannot be a run folder: {e.strerror}", fix="--output with another name") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} cannot be written", fix="--output with another name")
    lock_run(folder)
    (folder / "run.json").unlink(missing_ok=True)  # the run that it describes is about to be overwritten


def has_ended_well(folder: Path) -> bool:
    """Whether a folder has a run that did not fail."""
    from ..core import files

    if not (folder / "run.json").exists():
        return False
    try:
        document = files.read_json(folder / "run.json")
    except DrumlineError:  # not ours to judge, and not ours to remove
        return True
    return not (isinstance(document, dict) and document.get("failure"))


def make_run(
    folder: Path,
    job: Job,
    forecast: Forecast,
    reports: RankReports,
    earlier: Iterable[StepRecord],
    command: tuple[str, ...],
    *,
    failure: str = "",
) -> Run:
    """The run; `earlier` are the steps of the run that it continues. A run that failed has no results of its ranks."""
    from ..reports import Run

    f, records, speed = forecast, reports.records, reports.speed
    predicted = f.estimate if speed is None else f.estimate.at_speed(speed)
    run = Run(
        name=folder.name,
        job=job.source or "in memory",
        digest=job.digest,
        command=command,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        versions=_versions(),
        ranks=f.plan.ranks,
        device=f.cluster.device.kind,
        batch_size=job.batch_size,
        plan=f.plan,
        cluster=f.cluster,
        profile=f.profile,
        estimate=predicted,
        answer=f.answer,
        steps=(*(s for s in earlier if not records or s.step < records[0].step), *records),
        predicted=predicted_timeline(f.profile, f.plan, f.cluster, predicted, speed or 1.0),
        step_seconds=statistics.median(r.seconds for r in records) if records else 0.0,
        faults=reports.faults,
        gradients=reports.gradients,
        failure=failure,
        folder=folder,
    )
    return run if failure else _with_results(run, f, reports)


def _with_results(run: Run, f: Forecast, reports: RankReports) -> Run:
    """Add what only ranks that ended well can report."""
    results, first = reports.results, reports.first
    return dataclasses.replace(
        run,
        device=first["device"],
        measured=measured_timeline(results, meet=f.plan.sync == "allreduce"),
        step_seconds=max(r["step_seconds"] for r in results),
        peak_bytes=max(r["peak_bytes"] for r in results),
        memory_parts=max(results, key=lambda r: r["peak_bytes"])["parts"],
        evaluation=first["evaluation"],
        division=_split_summary(f.profile, f.plan, f.cluster, results) if len(results) == f.plan.processes else None,
    )


def _split_summary(
    profile: Profile, plan: Plan, cluster: Cluster, results: list[dict[str, Any]]
) -> SplitSummary | None:
    """How the plan split the model, as the first rank reported it, and a pipeline's bubbles."""
    summary: SplitSummary | None = results[0]["division"]
    if summary is None or plan.pp == 1:
        return summary
    from ..costs import OperatorCostModel
    from ..costs.pipeline_cost import schedule_of
    from ..runtime.pipeline.clock import measured_bubble, order_bubble

    lanes = [r["lanes"] for r in results]
    pipeline = OperatorCostModel(profile, cluster, plan.precision).step(plan).pipeline
    assert pipeline is not None
    of_order = order_bubble(schedule_of(plan), lanes, plan.micro)
    bubbles = {"predicted": pipeline.bubble, "measured": measured_bubble(lanes), "order": of_order}
    return dataclasses.replace(summary, bubble={k: v for k, v in bubbles.items() if v is not None})


def write_last_step(path: str | Path, reports: RankReports) -> None:
    """Write the last step for Perfetto."""
    from ..core import files
    from ..core.timeline import Timeline

    notes = (f"step {reports.records[-1].step}",)
    files.write_text(path, Timeline("measured", tuple(reports.last_step), notes=notes).to_chrome())


def _machine() -> str:
    from ..measurement.machine import cpu_name

    return f"{platform.node()}: {os.cpu_count()} x {cpu_name()}, {platform.system()} {platform.release()}"


def _versions() -> dict[str, str]:
    import torch

    from .. import __version__

    return {"drumline": __version__, "torch": torch.__version__, "python": platform.python_version()}
