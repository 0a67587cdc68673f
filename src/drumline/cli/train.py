"""`drumline train`: plan if asked, run the job on local ranks, show every step, leave a run folder."""

from __future__ import annotations

import dataclasses
import datetime
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import InputError, nearest
from .checkpoints import Checkpoints, goes_on, stopping
from .corrections import NoCorrections
from .screen import FORMATS, Screen

if TYPE_CHECKING:
    from ..core.job import Job
    from ..reports import Run, StepRecord
    from ..runtime.checkpoint.during import Saves
    from ..runtime.guards.guard import Guards
    from ..runtime.telemetry.log import Log
    from ..runtime.telemetry.sinks import Sink
    from .foreseen import Foreseen
    from .trained import Trained


def train(
    target: str = typer.Argument(..., metavar="JOB", help="path.py or path.py:name."),
    plan: str = typer.Option("auto", "--plan", help="`auto`, the notation, or a TOML file."),
    ranks: int = typer.Option(None, "--ranks", "-n", help="Local ranks (default: the plan's, or the cores)."),
    steps: int = typer.Option(None, "--steps", help="Optimizer steps (default: the job's)."),
    cluster: str = typer.Option(None, "--cluster", help="The cluster file to predict with (default: measured here)."),
    output: str = typer.Option(None, "--output", "-o", help="The run folder (default: runs/JOB-DATE)."),
    on_nonfinite: str = typer.Option("stop", "--on-nonfinite", help="`stop` or `skip` a step that is not finite."),
    vote: int = typer.Option(0, "--vote", metavar="N", help="Compare the replicas every N steps (0: never)."),
    log_format: str = typer.Option("text", "--log-format", help="Lines of `text`, or of `jsonl` with the same fields."),
    log_every: int = typer.Option(None, "--log-every", help="Steps between two lines."),
    tensorboard: str = typer.Option(None, "--tensorboard", metavar="DIR", help="Write the fields for TensorBoard too."),
    wandb: bool = typer.Option(False, "--wandb", help="Write them for Weights & Biases too (offline)."),
    trace: str = typer.Option(None, "--trace", metavar="FILE", help="Write the last step for Perfetto, unprofiled."),
    save_every: int = typer.Option(0, "--save-every", metavar="N", help="Save a checkpoint every N steps (0: none)."),
    keep: int = typer.Option(2, "--keep", metavar="K", help="Checkpoints that stay (2 at least)."),
    resume: str = typer.Option(None, "--resume", metavar="auto|PATH", help="Go on from the newest checkpoint, or one."),
    mtbf: str = typer.Option("24h", "--mtbf", help="Time between failures, for the advice on --save-every."),
    no_corrections: NoCorrections = False,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document at the end."),
) -> None:
    """Train a job; compare it with its prediction."""
    from .common import print_json

    run, folder = train_now(
        target,
        plan=plan,
        ranks=ranks,
        steps=steps,
        cluster=cluster,
        output=output,
        quiet=as_json,
        shown=Shown(log_format, log_every, tensorboard, wandb, trace),
        guards={"nonfinite": on_nonfinite, "vote": vote},
        checkpoints=Checkpoints(save_every, keep, resume, mtbf),
        corrections=not no_corrections,
    )
    if as_json:
        print_json(summary(run, folder))


@dataclass(frozen=True, slots=True)
class Shown:
    """Where the records of the steps go."""

    form: str = "text"
    """`text` or `jsonl`, on standard output."""
    every: int | None = None
    """Steps between two lines."""
    tensorboard: str | None = None
    wandb: bool = False
    trace: str | None = None
    """A file for Perfetto with the last step."""

    def __post_init__(self) -> None:
        if self.form not in FORMATS:
            rule = f"--log-format is {' or '.join(FORMATS)}"
            raise InputError(f"--log-format {self.form}", rule=rule, fix=nearest(self.form, FORMATS))
        if self.every is not None and self.every < 1:
            raise InputError(f"--log-every {self.every}", rule="at least one step")


def summary(run: Run, folder: Path) -> dict[str, Any]:
    """What `--json` prints of a run."""
    from .plan import host_bytes

    return {
        "run": str(folder),
        "plan": str(run.plan),
        "steps": len(run.steps),
        "losses": _losses(run),
        "step_seconds": run.step_seconds,
        "predicted_step_seconds": run.estimate.step_seconds,
        "uncorrected_step_seconds": run.estimate.uncorrected_seconds,
        "correction": run.estimate.correction,
        "peak_bytes": run.peak_bytes,
        "predicted_peak_bytes": run.estimate.memory_bytes,
        "time_error": run.time_error,
        "memory_error": run.memory_error,
        "evaluation": run.evaluation,
        "skipped": run.steps[-1].skipped if run.steps else 0,
        "notes": list(run.estimate.notes),
        **host_bytes(run.estimate),
        **({"division": dataclasses.asdict(run.division)} if run.division else {}),
    }


def _losses(run: Run) -> list[float | None]:
    """JSON has no number that is not finite: a skipped step has none."""
    return [s.loss if math.isfinite(s.loss) else None for s in run.steps]


def train_now(
    target: str,
    *,
    plan: str = "auto",
    ranks: int | None = None,
    steps: int | None = None,
    cluster: str | None = None,
    output: str | None = None,
    quiet: bool = False,
    overwrite: bool = False,
    shown: Shown | None = None,
    guards: dict[str, Any] | None = None,
    checkpoints: Checkpoints | None = None,
    corrections: bool = False,
) -> tuple[Run, Path]:
    """Trace, plan, predict, train, save. The run and its folder.

    With `corrections`, earlier runs on this machine correct the prediction, and this one is kept for the next.
    """
    from ..core.job import Job
    from ..reports.page import write_page
    from ..reports.steps import STEPS, earlier_steps
    from ..runtime.guards.guard import Guards
    from ..runtime.telemetry.log import Facts, Log
    from ..runtime.telemetry.sinks import JsonFile
    from .corrections import keep
    from .foreseen import foresee
    from .trained import prepare, run_of, write_trace

    _check(target, ranks, steps)
    guard = Guards(**(guards or {}))
    if checkpoints:
        checkpoints.check()
    shown = shown or Shown()
    job = Job.load(target)
    seen = foresee(job, plan, ranks, cluster, corrections=corrections, quiet=quiet)
    folder = Path(output) if output else Path("runs") / f"{job.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    saves = checkpoints.of(job.name, folder) if checkpoints else None
    prepare(folder, overwrite=overwrite or bool(saves and saves.resume))
    count = steps or job.steps
    out = Screen(count, quiet=quiet, form=shown.form, every=shown.every)
    earlier = earlier_steps(folder / STEPS) if goes_on(saves, folder) else ()
    config = {"job": job.source, "plan": str(seen.plan), "steps": count}
    sinks = [JsonFile(folder / STEPS, goes_on=bool(earlier)), *_sinks(shown, folder, config)]
    out.say(seen.why)
    out.start(job.source, seen.plan, seen.estimate)
    log = Log(Facts.of(count, seen.plan, seen.profile, seen.cluster, seen.estimate))
    trained = _run(job, seen, count, guard, log, sinks, out, saves)
    run = run_of(folder.name, job, seen, trained, earlier)
    run.save(folder)
    page = write_page(run, folder)
    if shown.trace:
        write_trace(shown.trace, trained)
    out.end(run, folder, page, trained.first["seconds_by_phase"], taken=len(trained.records))
    if checkpoints:
        out.say(checkpoints.advice(trained.first["save_stall"], run.step_seconds))
    if corrections:
        own = [r["own_by_phase"] for r in trained.results]
        first = trained.first
        out.say(keep(seen.file, run, seen.speed_of(first), own, first["counted"], drift=first.get("drift", 0.0)))
    if trained.first["preempted"]:
        print("preempted: go on with --resume auto", file=sys.stderr)
    return run, folder


def _check(target: str, ranks: int | None, steps: int | None) -> None:
    """Refuse what cannot be trained, before anything is loaded."""
    from .common import is_job

    if not is_job(target):
        rule = "a job is path.py or path.py:name; zoo models can only be planned"
        raise InputError(f"{target!r} is no job", rule=rule)
    if steps is not None and steps < 1:
        raise InputError(f"--steps {steps}", rule="at least one step")
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}", rule="at least one rank")


def _sinks(shown: Shown, folder: Path, config: dict[str, Any]) -> list[Sink]:
    """Where records go beside the screen and the run folder; what is not installed is refused before the training."""
    from ..runtime.telemetry.sinks import TensorBoard, Wandb

    sinks: list[Sink] = [TensorBoard(shown.tensorboard)] if shown.tensorboard else []
    if shown.wandb:
        sinks.append(Wandb(folder.name, folder, config))
    return sinks


def _run(
    job: Job, seen: Foreseen, steps: int, guards: Guards, log: Log, sinks: list[Sink], out: Screen, saves: Saves | None
) -> Trained:
    """Start the ranks, and show and write what they tell."""
    from ..core.units import format_seconds
    from ..costs.axes import flops_per_byte
    from ..launchers import run_ranks
    from .ranks import train_rank
    from .trained import Trained

    plan, device = seen.plan, seen.cluster.device
    records: list[StepRecord] = []
    speeds: list[float] = []

    def on_event(rank: int, e: dict[str, Any]) -> None:
        if "said" in e:
            out.say(e["said"])
        elif (speed := seen.speed_of(e)) is not None:
            speeds.append(speed)
            log.predicted = log.predicted / speed if log.predicted else None
            at = f"; predicted {format_seconds(log.predicted)} a step" if log.predicted else ""
            if "pace" in e:
                out.say(f"the host of the GPU now takes {e['pace']:.2f} times as long as when it was measured{at}")
            else:
                out.say(f"the machine now runs at {speed:.2f} of its measured speed{at}")
        else:
            records.append(log.record(e))
            for sink in sinks:
                sink.write(records[-1])
            out.step(records[-1], probed=e["probed"])

    try:
        with out, stopping(saves):
            results = run_ranks(
                train_rank,
                job.reference,
                str(plan),
                steps,
                bool(job.evaluate or job.validation),
                device if seen.cluster.measured else None,
                guards,
                saves,
                flops_per_byte(plan, seen.cluster) if plan.pp > 1 else None,
                ranks=plan.processes,
                threads=device.threads or None,
                on_event=on_event,
            )
    finally:
        for sink in sinks:
            sink.close()
    return Trained(records, results, speeds[0] if speeds else None)
