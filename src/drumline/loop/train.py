"""`dl.train`: plan if asked, predict, run the job on local ranks through their faults, write the run folder."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import DrumlineError, GaveUp, InputError, RankFailed
from .callbacks import Notify, Progress, ignore_progress, log_note
from .checkpoints import CheckpointOptions, continues, stop_on_signal
from .corrections import keep_run
from .external_ranks import joins_ranks
from .forecast import AUTO, Forecast, forecast
from .inputs import JOB_RULE, check_local, describe, load_job
from .main_guard import RankJob, rank_job
from .rank_tasks import run_job_ranks, train_rank
from .restarts import FaultOptions, Replacements, RestartLoop
from .run_lock import releases_run_lock
from .training import RankReports, make_run, prepare_folder, write_last_step
from .training_events import TrainingEvents

if TYPE_CHECKING:
    from ..costs import Estimate
    from ..plans import Plan
    from ..reports import Run, StepRecord
    from ..runtime.guards.guard import Guards
    from ..runtime.telemetry.sinks import Sink
    from ..runtime.training.checkpoint_policy import CheckpointPolicy
    from .inputs import ClusterInput, JobInput, PlanInput


class TrainObserver:
    """Follows a training while it runs. The methods do nothing; override what should be shown."""

    def note(self, text: str) -> None:
        """A sentence for the user."""

    def warn(self, text: str) -> None:
        """A sentence that the user should not miss."""
        log_note(text)

    def start(self, job: str, plan: Plan, predicted: Estimate, steps: int) -> None:
        """The ranks are about to start."""

    def step(self, record: StepRecord, *, profiled: bool) -> None:
        """One more step is done."""

    def close(self) -> None:
        """The ranks have ended, well or not."""

    def end(self, run: Run, page: Path, phases: dict[str, float], *, taken: int) -> None:
        """The run is saved. `phases` are seconds by phase, `taken` the steps of this call."""


@dataclass(frozen=True, slots=True)
class RecordSinks:
    """Where step records go besides the run folder."""

    tensorboard: str | None = None
    """A folder."""
    wandb: bool = False
    """Weights & Biases, offline."""
    trace: str | None = None
    """A file for Perfetto with the last step."""


@dataclass(frozen=True, slots=True)
class _StepCallback(TrainObserver):
    on_step: Callable[[StepRecord], None]

    def step(self, record: StepRecord, *, profiled: bool) -> None:
        """Pass the record on."""
        self.on_step(record)


@joins_ranks
@releases_run_lock
def train(
    job: JobInput,
    plan: PlanInput = AUTO,
    *,
    steps: int | None = None,
    ranks: int | None = None,
    cluster: ClusterInput = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    compare: bool = False,
    corrections: bool = True,
    guards: Guards | None = None,
    checkpoints: CheckpointOptions | None = None,
    faults: FaultOptions | None = None,
    sinks: RecordSinks | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    observer: TrainObserver | None = None,
    progress: Progress = ignore_progress,
    command: Sequence[str] = (),
) -> Run:
    """Train a job under a plan on local ranks; the run with its losses, measured and predicted times, and folder.

    `plan` is `auto` (search for the fastest), or the plan to run. A given plan is priced; `compare` also searches, so
    that the report ranks it among the others. `cluster` is what to predict with (default: this machine). `output` is
    the run folder (default: runs/JOB-DATE). With `corrections`, earlier runs on this machine correct the prediction,
    and this run is recorded for later ones. `faults` says what happens when a rank fails (default: the run restarts
    from its newest checkpoint). `on_step` gets a record after each step.
    """
    from ..reports.page import write_page
    from ..reports.step_records import STEPS, earlier_steps
    from ..runtime.guards.guard import Guards

    _check_counts(ranks, steps)
    checkpoints, faults = checkpoints or CheckpointOptions(), faults or FaultOptions()
    checkpoints.check()
    faults.check()
    watch = observer or (_StepCallback(on_step) if on_step else TrainObserver())
    loaded = load_job(job, rule=f"{JOB_RULE}; zoo models can only be planned")
    sent = rank_job(job, loaded)
    f = forecast(
        loaded, plan, ranks, cluster, corrections=corrections, compare=compare, notify=watch.warn, progress=progress
    )
    check_local(f.plan)
    count = steps or loaded.steps
    faults.check_chaos(f.plan, count)
    if sent.problem is not None and f.plan.processes > 1:
        raise sent.problem
    folder = Path(output) if output else Path("runs") / f"{loaded.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    saves = checkpoints.policy(loaded.name, folder, watch.note)
    prepare_folder(folder, overwrite=overwrite or saves.resume is not None)
    earlier = earlier_steps(folder / STEPS) if continues(saves, folder) else ()
    targets = _open_sinks(
        sinks or RecordSinks(),
        folder,
        {"job": loaded.source, "plan": str(f.plan), "steps": count},
        watch.warn,
        continued=bool(earlier),
    )
    watch.note(f.skipped)
    watch.start(describe(loaded), f.plan, f.estimate, count)
    command = tuple(command or (f"drumline.train({describe(loaded)!r}, {str(f.plan)!r})",))
    events = TrainingEvents(f, count, targets, watch, earlier=earlier)
    try:
        reports = _run_ranks(sent, f, count, guards or Guards(), events, saves, faults)
    except (DrumlineError, KeyboardInterrupt) as e:
        if events.records or isinstance(e, GaveUp):
            failure = e.what if isinstance(e, DrumlineError) else "interrupted"
            failed = make_run(folder, loaded, f, events.reports([]), earlier, command, failure=failure)
            _keep_failed_run(failed, folder, watch)
        raise
    run = make_run(folder, loaded, f, reports, earlier, command)
    run.save(folder)
    page = write_page(run, folder)
    if sinks and sinks.trace:
        write_last_step(sinks.trace, reports)
    first = reports.first
    watch.end(run, page, first["seconds_by_phase"], taken=len(reports.records))
    watch.note(checkpoints.advice(first["save_stall"], run.step_seconds, run.ranks))
    if corrections and not reports.faults and not f.plan.has_coordinator:
        own = [r["own_by_phase"] for r in reports.results]
        watch.note(keep_run(f.file, run, f.speed_of(first), own, first["counted"], drift=first.get("drift", 0.0)))
    if first["preempted"]:
        watch.warn("preempted: continue with --resume auto")
    return run


def _keep_failed_run(run: Run, folder: Path, watch: TrainObserver) -> None:
    """Save a run that failed, with its page. If the disk refuses, that is said: the error to raise is the run's."""
    from ..reports.page import write_page

    try:
        run.save(folder)
        watch.note(f"report: {write_page(run, folder)}")
    except DrumlineError as e:
        watch.warn(f"the failed run has no record: {e.what}")


def _check_counts(ranks: int | None, steps: int | None) -> None:
    if steps is not None and steps < 1:
        raise InputError(f"steps={steps}", rule="at least one step")
    if ranks is not None and ranks < 1:
        raise InputError(f"ranks={ranks}", rule="at least one rank")


def _open_sinks(
    sinks: RecordSinks, folder: Path, config: dict[str, Any], notify: Notify, *, continued: bool
) -> list[Sink]:
    """Open every sink; a package that is not installed is refused before the training."""
    from ..reports.step_records import STEPS
    from ..runtime.telemetry.sinks import JsonLinesFile, TensorBoard, TolerantSink, Wandb

    opened: list[Sink] = [JsonLinesFile(folder / STEPS, resume=continued)]
    if sinks.tensorboard:
        opened.append(TensorBoard(sinks.tensorboard))
    if sinks.wandb:
        opened.append(Wandb(folder.name, folder, config))
    return [TolerantSink(sink, notify) for sink in opened]


def _run_ranks(
    job: RankJob,
    f: Forecast,
    steps: int,
    guards: Guards,
    events: TrainingEvents,
    saves: CheckpointPolicy,
    faults: FaultOptions,
) -> RankReports:
    """Run the ranks, through their faults, until the training ends; show and write what they report."""
    from ..costs.collectives import flops_per_byte
    from ..runtime.asynchronous.invitation import withdraw_invitation

    device = f.cluster.device
    hang_watch = faults.watch()

    def attempt(plan: Plan, saves: CheckpointPolicy, number: int) -> list[Any]:
        events.begin(plan)
        try:
            return run_attempt(plan, saves, number)
        except RankFailed as e:
            raise events.explain(e) from None

    def run_attempt(plan: Plan, saves: CheckpointPolicy, number: int) -> list[Any]:
        return run_job_ranks(
            train_rank,
            job,
            str(plan),
            steps,
            bool(job.job.evaluate or job.job.validation),
            device if f.cluster.measured and not number else None,
            guards,
            saves,
            flops_per_byte(plan, f.cluster) if plan.pp > 1 else None,
            faults.chaos,
            number,
            ranks=plan.processes,
            threads=device.threads or None,
            on_event=events,
            watch=hang_watch,
            handles_signals=True,
            replace=Replacements(plan, faults, events) if plan.has_coordinator else None,
        )

    loop = RestartLoop(
        attempt,
        f.plan,
        saves,
        faults,
        steps=steps,
        watch=hang_watch,
        steps_done=lambda: events.steps_done,
        notify=events.observer.warn,
    )
    events.faults = loop.faults
    try:
        with stop_on_signal(saves):
            return events.reports(loop.run())
    finally:
        events.close()
        if f.plan.has_coordinator:
            withdraw_invitation(Path(saves.folder).parent)
