"""`drumline train`: train a job on local ranks, show every step, leave a run folder with a report."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import InputError, nearest
from .common import MTBF, NoCorrections, host_bytes
from .completion import complete_cluster, complete_job_file, complete_plan
from .screen import FORMATS, Screen

if TYPE_CHECKING:
    from ..reports import Run


def train(
    target: str = typer.Argument(..., metavar="JOB", autocompletion=complete_job_file, help="path.py or path.py:name."),
    plan: str = typer.Option(
        "auto", "--plan", autocompletion=complete_plan, help="`auto`, the notation, or a TOML file."
    ),
    ranks: int = typer.Option(None, "--ranks", "-n", help="Local ranks (default: the plan's, or the cores)."),
    steps: int = typer.Option(None, "--steps", help="Optimizer steps (default: the job's)."),
    cluster: str = typer.Option(
        None,
        "--cluster",
        autocompletion=complete_cluster,
        help="The cluster file to predict with (default: this machine).",
    ),
    output: str = typer.Option(None, "--output", "-o", help="The run folder (default: runs/JOB-DATE)."),
    compare: bool = typer.Option(False, "--compare", help="Rank a given --plan among all others in the report."),
    on_nonfinite: str = typer.Option("stop", "--on-nonfinite", help="`stop` at or `skip` a step that is not finite."),
    vote: int = typer.Option(0, "--vote", metavar="N", help="Compare the replicas every N steps (0: never)."),
    log_format: str = typer.Option("text", "--log-format", help="Log lines as `text` or `jsonl`."),
    log_every: int = typer.Option(None, "--log-every", metavar="N", help="Log every N steps."),
    tensorboard: str = typer.Option(None, "--tensorboard", metavar="DIR", help="Also log to TensorBoard."),
    wandb: bool = typer.Option(False, "--wandb", help="Also log to Weights & Biases (offline)."),
    trace: str = typer.Option(None, "--trace", metavar="FILE", help="Write the last step, unprofiled, for Perfetto."),
    save_every: int = typer.Option(0, "--save-every", metavar="N", help="Save a checkpoint every N steps (0: never)."),
    keep: int = typer.Option(2, "--keep", metavar="K", help="Checkpoints to keep (at least 2)."),
    resume: str = typer.Option(
        None, "--resume", metavar="auto|PATH", help="Resume from the newest checkpoint, or PATH."
    ),
    mtbf: str = typer.Option(None, "--mtbf", help=f"For advice on --save-every: {MTBF}"),
    restarts: int = typer.Option(3, "--restarts", metavar="N", help="Restarts without a new step (0: none)."),
    min_ranks: int = typer.Option(
        None, "--min-ranks", metavar="N", help="If a rank does not come back, continue with fewer, at least N."
    ),
    hang_timeout: str = typer.Option(None, "--hang-timeout", help="Silence that counts as a hang (default: learnt)."),
    chaos: str = typer.Option("", "--chaos", metavar="FAULTS", help="Inject faults, such as `kill:1@5` (docs/faults)."),
    no_corrections: NoCorrections = False,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document at the end."),
) -> None:
    """Train a job; compare it with its prediction."""
    from ..core.streams import tolerant_output
    from ..loop.checkpoints import CheckpointOptions
    from ..loop.restarts import FaultOptions
    from ..loop.train import RecordSinks
    from ..loop.train import train as run
    from ..runtime.guards.guard import Guards
    from .common import measuring, print_json

    check_log_options(log_format, log_every)
    with tolerant_output(), measuring(quiet=as_json) as progress:
        done = run(
            target,
            plan,
            steps=steps,
            ranks=ranks,
            cluster=cluster,
            output=output,
            compare=compare,
            corrections=not no_corrections,
            guards=Guards(nonfinite=on_nonfinite, vote=vote),
            checkpoints=CheckpointOptions(save_every, keep, resume, mtbf),
            faults=FaultOptions(restarts, hang_timeout, min_ranks, chaos=chaos),
            sinks=RecordSinks(tensorboard, wandb, trace),
            observer=Screen(quiet=as_json, form=log_format, every=log_every),
            progress=progress,
            command=sys.argv,
        )
    if as_json:
        print_json(run_json(done))


def check_log_options(form: str, every: int | None) -> None:
    """Refuse bad values before anything is traced or measured."""
    if form not in FORMATS:
        rule = f"--log-format is {' or '.join(FORMATS)}"
        raise InputError(f"--log-format {form}", rule=rule, fix=nearest(form, FORMATS))
    if every is not None and every < 1:
        raise InputError(f"--log-every {every}", rule="at least one step")


def run_json(run: Run) -> dict[str, Any]:
    """The JSON document of a run."""

    return {
        "run": str(run.folder),
        "plan": str(run.plan),
        "steps": len(run.steps),
        # JSON has no NaN: the loss of a step that was not finite is null
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],
        "step_seconds": run.step_seconds,
        "predicted_step_seconds": run.estimate.step_seconds,
        "uncorrected_step_seconds": run.estimate.uncorrected_seconds,
        "correction": run.estimate.correction,
        "throughput": run.throughput.to_json() if run.throughput else None,
        "peak_bytes": run.peak_bytes,
        "predicted_peak_bytes": run.estimate.memory_bytes,
        "time_error": run.time_error,
        "memory_error": run.memory_error,
        "evaluation": run.evaluation,
        "skipped": run.steps[-1].skipped if run.steps else 0,
        "notes": list(run.estimate.notes),
        "data_share": run.data_share,
        "predicted_data_seconds": run.estimate.data_seconds,
        "predicted_data_wait_seconds": run.estimate.data_wait_seconds,
        "faults": list(run.faults),
        "gradients": run.gradients,
        "failure": run.failure,
        **host_bytes(run.estimate),
        **({"division": dataclasses.asdict(run.division)} if run.division else {}),
    }
