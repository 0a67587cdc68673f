"""Functions that run on every rank: a training, a verification. And how they are started for a job."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.job import Job
from .external_ranks import current_ranks

if TYPE_CHECKING:
    from ..clusters import DeviceSpec
    from ..launchers.hang_watch import HangWatch
    from ..launchers.local import Replace
    from ..runtime.engine import Engine
    from ..runtime.guards.guard import Guards
    from ..runtime.training.checkpoint_policy import CheckpointPolicy
    from ..runtime.verification.verify import Verification
    from .main_guard import RankJob

Emit = Callable[[dict[str, Any]], None]


def run_job_ranks(
    task: Callable[..., Any],
    job: RankJob,
    *arguments: Any,
    ranks: int,
    threads: int | None = None,
    on_event: Callable[[int, dict[str, Any]], None] | None = None,
    watch: HangWatch | None = None,
    handles_signals: bool = False,
    replace: Replace | None = None,
) -> list[Any]:
    """Run `task(emit, job, *arguments)` on local ranks. One rank of a job that only this process has runs here.

    `watch` ends ranks that hang; with `handles_signals` the task handles TERM and USR1 itself; `replace` names ranks
    that are restarted after a failure.
    """
    from ..launchers import run_ranks
    from ..launchers.external_ranks import OWN

    sent = job.sent
    if current_ranks() is not None and not isinstance(sent, str):
        sent = OWN  # every rank has called the verb with its own
    if sent is not None:
        return run_ranks(
            task,
            sent,
            *arguments,
            ranks=ranks,
            threads=threads,
            on_event=on_event,
            watch=watch,
            handles_signals=handles_signals,
            replace=replace,
        )
    if ranks > 1:
        assert job.problem is not None
        raise job.problem
    from ..comm.environment import disconnect

    try:
        return [task(lambda event: on_event(0, event) if on_event else None, job.job, *arguments)]
    finally:
        disconnect()


def load_sent_job(sent: str | Job | Callable[[], Job]) -> Job:
    """The job on a rank: from its file, as it was sent, or made by the function that was sent."""
    if isinstance(sent, Job):
        return sent
    return Job.load(sent) if isinstance(sent, str) else sent()


def train_rank(
    emit: Emit,
    sent: str | Job | Callable[[], Job],
    plan: str,
    steps: int,
    evaluate: bool,
    measured: DeviceSpec | None,
    guards: Guards,
    saves: CheckpointPolicy | None = None,
    flops_per_byte: float | None = None,
    chaos: str = "",
    attempt: int = 0,
) -> dict[str, Any]:
    """Set up the job, report the machine's speed now relative to when it was `measured`, and train.

    `chaos` are faults to inject, `attempt` is the number of restarts before this one.
    """
    import os

    from ..comm.fault_injection import ATTEMPT, CHAOS
    from ..core.rank_info import REPLACED
    from ..plans import Plan
    from ..runtime.asynchronous.run import is_worker, make_worker, serve
    from ..runtime.asynchronous.worker import work
    from ..runtime.engine import initialize
    from ..runtime.training.train import train

    if chaos:
        os.environ.update({CHAOS: chaos, ATTEMPT: str(attempt + int(os.environ.get(REPLACED, "0")))})
    job, parsed = load_sent_job(sent), Plan.parse(plan)
    if not parsed.has_coordinator:
        engine = initialize(job, parsed, guards=guards, flops_per_byte=flops_per_byte)
        run = functools.partial(train, engine, emit, steps=steps, evaluate=evaluate, saves=saves)
        return _at_current_speed(engine, emit, measured, run)
    if is_worker(parsed):
        worker = make_worker(job, parsed, guards=guards)
        run = functools.partial(work, worker, emit, evaluate=evaluate)
        if int(os.environ.get(REPLACED, "0")):  # the machine's speed is known, and its cores are busy
            measured = None
        return _at_current_speed(worker, emit, measured, run, reports=worker.worker == 0)
    return serve(job, parsed, emit, steps=steps, guards=guards, saves=saves)


def _at_current_speed(
    engine: Engine,
    emit: Emit,
    measured: DeviceSpec | None,
    run: Callable[[], dict[str, Any]],
    *,
    reports: bool | None = None,
) -> dict[str, Any]:
    """Run a training, and report the machine's speed before and during it; `reports`: from this process."""
    from ..measurement.host_overhead import host_slowdown
    from ..measurement.speed_probe import ROUNDS_AFTER, current_speed, expected_speed, speed_during_run

    reports = engine.rank == 0 if reports is None else reports
    if measured is None:
        return run()
    if engine.device.type == "cuda":  # a GPU keeps its speed, its host does not
        pace = host_slowdown(measured, engine.device)
        if reports and pace:
            emit({"pace": pace})
        result = run()
        after = host_slowdown(measured, engine.device) if pace else None
        return result | ({"pace": math.sqrt(pace * after), "drift": _drift(pace, after)} if pace and after else {})
    before = current_speed(measured, engine.device)
    if reports:
        emit({"speed": expected_speed(before, engine.device)})
    result = run()
    after = current_speed(measured, engine.device, rounds=ROUNDS_AFTER)
    return result | {"speed": speed_during_run(before, after, engine.device), "drift": _drift(before, after)}


def _drift(before: float, after: float) -> float:
    """How far the machine's speed moved during a run, in either direction, as a logarithm."""
    return abs(math.log(after / before))


def verify_rank(emit: Emit, sent: str | Job | Callable[[], Job], plan: str, steps: int) -> Verification | None:
    """One rank's part of a verification; the first rank returns the result."""
    from ..plans import Plan
    from ..runtime.asynchronous.verification import verify_coordinated
    from ..runtime.verification.verify import verify

    parsed = Plan.parse(plan)
    return (verify_coordinated if parsed.has_coordinator else verify)(load_sent_job(sent), parsed, steps=steps)
