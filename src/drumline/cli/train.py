"""`drumline train`: plan if asked, run the job on local ranks, show every step, leave a run folder."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import InputError

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..model import Profile
    from ..plan import Plan
    from ..report import Run, StepRecord
    from ..search import Answer


def train(
    target: str = typer.Argument(..., metavar="JOB", help="path.py or path.py:name."),
    plan: str = typer.Option("auto", "--plan", help="`auto`, the notation, or a TOML file."),
    ranks: int = typer.Option(None, "--ranks", "-n", help="Local ranks (default: the plan's, or the cores)."),
    steps: int = typer.Option(None, "--steps", help="Optimizer steps (default: the job's)."),
    cluster: str = typer.Option(None, "--cluster", help="The cluster file to predict with (default: measured here)."),
    output: str = typer.Option(None, "--output", "-o", help="The run folder (default: runs/JOB-DATE)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document at the end."),
) -> None:
    """Train a job; compare it with its prediction."""
    from .common import print_json

    run, folder = train_now(
        target, plan=plan, ranks=ranks, steps=steps, cluster=cluster, output=output, quiet=as_json
    )
    if as_json:
        print_json(summary(run, folder))


def summary(run: Run, folder: Path) -> dict[str, Any]:
    """What `--json` prints of a run."""
    return {
        "run": str(folder), "plan": str(run.plan), "steps": len(run.steps), "losses": [s.loss for s in run.steps],
        "step_seconds": run.step_seconds, "predicted_step_seconds": run.estimate.step_seconds,
        "peak_bytes": run.peak_bytes, "predicted_peak_bytes": run.estimate.memory_bytes,
        "time_error": run.time_error, "memory_error": run.memory_error, "evaluation": run.evaluation,
    }  # fmt: skip


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
) -> tuple[Run, Path]:
    """Trace, plan, predict, train, save. The run and its folder."""
    from ..cost import estimate
    from ..job import Job
    from ..plan import check
    from ..report import Run
    from ..report.page import write_page
    from ..simulate.step import simulate_step
    from ..timeline import Timeline
    from ..trace import trace
    from .common import cluster_of, is_job

    if not is_job(target):
        rule = "a job is path.py or path.py:name; zoo models can only be planned"
        raise InputError(f"{target!r} is no job", rule=rule)
    if steps is not None and steps < 1:
        raise InputError(f"--steps {steps}", rule="at least one step")
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}", rule="at least one rank")
    job = Job.load(target)
    given = None if plan == "auto" else _given_plan(plan, ranks)
    profile = trace(job)
    machines, _ = cluster_of(cluster, given.ranks if given else ranks, None, say=not quiet)
    answer, chosen = _answer(profile, machines, given)
    check(chosen)
    predicted = estimate(profile, chosen, machines)
    folder = Path(output) if output else Path("runs") / f"{job.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    _prepare(folder, overwrite=overwrite)
    count = steps or job.steps
    out = _Screen(count, predicted.step_seconds, quiet=quiet)
    out.start(job.source, chosen, answer, predicted)
    records, results, speed = _run(job.reference, chosen, count, bool(job.evaluate or job.validation), machines, out)
    predicted = predicted if speed is None else predicted.at_speed(speed)
    first = results[0]
    run = Run(
        name=folder.name, job=job.source, digest=job.digest, command=tuple(sys.argv),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), machine=_machine(),
        versions=_versions(), ranks=chosen.ranks, device=first["device"], batch_size=job.batch_size, plan=chosen,
        cluster=machines, profile=profile, estimate=predicted, answer=answer, steps=tuple(records),
        predicted=simulate_step(profile, chosen, machines, predicted, speed=speed or 1.0),
        measured=Timeline(
            "measured", tuple(s for r in results for s in r["spans"]),
            notes=(f"step {first['probed']}, recorded under the profiler, which slows it",),
        ),
        step_seconds=max(r["step_seconds"] for r in results), peak_bytes=max(r["peak_bytes"] for r in results),
        memory_parts=max(results, key=lambda r: r["peak_bytes"])["parts"], evaluation=first["evaluation"],
    )  # fmt: skip
    run.save(folder)
    page = write_page(run, folder)
    out.end(run, folder, page)
    return run, folder


def _prepare(folder: Path, *, overwrite: bool) -> None:
    """Refuse a run folder before the training, not after it."""
    if (folder / "run.json").exists() and not overwrite:
        raise InputError(f"{folder} holds a run already", fix="--output with another name, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"{folder} cannot be a run folder: {e.strerror}", fix="--output with another name") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} cannot be written", fix="--output with another name")


def _given_plan(text: str, ranks: int | None) -> Plan:
    from .common import plan_of
    from .verify import check_ranks

    plan = plan_of(text)
    check_ranks(plan, ranks)
    return plan


def _answer(profile: Profile, machines: Cluster, given: Plan | None) -> tuple[Answer, Plan]:
    """All candidates, and the plan to run: the best, or the one that was given."""
    from ..plan import Plan
    from ..search import search

    answer, _ = search(profile, machines, precision=given.precision if given else None)
    return answer, given or Plan.parse(answer.candidates[0].plan)


def _run(
    reference: str, plan: Plan, steps: int, evaluate: bool, machines: Cluster, out: _Screen
) -> tuple[list[StepRecord], list[dict[str, Any]], float | None]:
    """Start the ranks; a record per step, what each rank measured, and how fast the machine was when they began."""
    from ..launch import run_ranks
    from ..report import StepRecord
    from .ranks import train_rank

    records: list[StepRecord] = []
    speeds: list[float] = []

    def on_event(rank: int, e: dict[str, Any]) -> None:
        if "speed" in e:
            speeds.append(e["speed"])
            out.speed(e["speed"])
            return
        records.append(
            StepRecord(e["step"], e["loss"], e["grad_norm"], e["seconds"], e["samples"], e["memory_bytes"])
        )
        out.step(e)

    with out:
        results = run_ranks(
            train_rank, reference, str(plan), steps, evaluate, machines.device if machines.measured else None,
            ranks=plan.ranks, threads=machines.device.threads or None, on_event=on_event,
        )  # fmt: skip
    return records, results, speeds[0] if speeds else None


class _Screen:
    """What a person sees: a progress bar on a terminal, plain lines otherwise, nothing when quiet."""

    def __init__(self, steps: int, predicted: float, *, quiet: bool) -> None:
        from ..report.text import console

        self._steps, self._predicted, self._quiet = steps, predicted, quiet
        self._console = console()
        self._bar: Any = None
        self._task: Any = None
        self._memory = 0.0

    def __enter__(self) -> _Screen:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        if not self._quiet and self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=12), TextColumn("{task.description}"), TimeRemainingColumn(compact=True),
                console=self._console, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("starting the ranks", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, job: str, plan: Plan, answer: Answer, predicted: Any) -> None:
        if not self._quiet:
            from ..report.text import estimate_lines

            self._console.print(f"{job} with {plan}")
            self._console.print(estimate_lines(predicted))

    def speed(self, share: float) -> None:
        """The machine is not as fast, or faster, than when it was measured: the prediction follows."""
        from ..units import format_seconds

        self._predicted /= share
        if not self._quiet:
            told = f"{share:.2f} of its measured speed"
            self._console.print(f"the machine now runs at {told}: predicted {format_seconds(self._predicted)} a step")

    def step(self, e: dict[str, Any]) -> None:
        """One more step: `step 10/60 loss 3.21 grad 1.2 ...`."""
        from ..units import format_bytes, format_seconds

        if self._quiet:
            return
        self._memory = max(self._memory, e["memory_bytes"])
        number = e["step"] + 1
        line = (
            f"step {number}/{self._steps}  loss {e['loss']:.4f}  grad {e['grad_norm']:.3f}  "
            f"{format_seconds(e['seconds'])} (predicted {format_seconds(self._predicted)})  "
            f"{e['samples'] / e['seconds']:.0f} samples/s  {format_bytes(self._memory)}"
            + ("  (recorded)" if e["probed"] else "")
        )
        if self._bar is not None:
            short = line if self._console.width >= 110 else f"step {number} loss {e['loss']:.3f}"
            self._bar.update(self._task, completed=number, description=short)
        if self._bar is None or number == self._steps:
            every = max(1, self._steps // 20)
            if number == 1 or number % every == 0 or number == self._steps:
                self._console.print(line)

    def end(self, run: Run, folder: Path, page: Path) -> None:
        from ..report.text import against
        from ..units import format_bytes, format_seconds

        if self._quiet:
            return
        e = run.estimate
        self._console.print(
            against("step time", format_seconds(e.step_seconds), format_seconds(run.step_seconds), run.time_error)
        )
        self._console.print(
            against("peak memory", format_bytes(e.memory_bytes), format_bytes(run.peak_bytes), run.memory_error)
        )
        if len(run.steps) < 4:
            self._console.print("note: fewer than 4 steps, so the measured time holds warm-up and recording")
        for name, value in run.evaluation.items():
            self._console.print(f"evaluation: {name} {value:.4f}")
        self._console.print(f"run folder: {folder}")
        self._console.print(f"report: {page}")


def _machine() -> str:
    from ..measure.machine import cpu_name

    return f"{platform.node()}: {os.cpu_count()} x {cpu_name()}, {platform.system()} {platform.release()}"


def _versions() -> dict[str, str]:
    import torch

    from .. import __version__

    return {"drumline": __version__, "torch": torch.__version__, "python": platform.python_version()}
