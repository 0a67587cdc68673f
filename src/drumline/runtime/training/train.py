"""Trains a job on this rank and reports every step to the launcher."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...comm.rank_status import rank_status
from ...core.errors import StoppedByGuard
from ..engine import Engine
from ..guards.replicas import why_no_replicas
from .checkpoint_policy import CheckpointPolicy, TrainingCheckpoints, steps_left
from .evaluations import Evaluations
from .flight_recorder import FlightRecorder
from .slowest_rank import RankWatch
from .step_profiler import StepProfiler
from .step_reports import StepReports

Emit = Callable[[dict[str, Any]], None]


def train(
    engine: Engine, emit: Emit, *, steps: int, evaluate: bool, saves: CheckpointPolicy | None = None
) -> dict[str, Any]:
    """Run one rank's whole training; the first rank calls `emit` with a record of every step."""
    checkpoints = TrainingCheckpoints(engine, saves, lambda text: emit({"message": text})) if saves else None
    if checkpoints is not None:
        checkpoints.begin()
    left = steps_left(engine, steps)
    evaluations = Evaluations(engine, emit)
    profiler = StepProfiler(engine) if engine.in_flight is None else FlightRecorder(engine)
    probed = min(profiler.warm_up, left - 1)
    reports = StepReports(engine, emit, lambda: _memory(engine, profiler), ignored=probed)
    _begin(engine, emit)
    first = engine.position
    profiler.begin()
    try:
        _run_steps(engine, left, probed, profiler, reports, checkpoints, evaluations)
    finally:
        profiler.end()
    rank_status().place("ending")
    with _saving_good_weights(reports, checkpoints):
        engine.average_replicas()  # the result is one model
    reports.exchange()
    preempted = checkpoints is not None and checkpoints.preempted
    if checkpoints is not None:
        checkpoints.end()
    return {
        "step_seconds": reports.times.typical,
        "data_seconds": statistics.median(reports.waits),
        "peak_bytes": profiler.peak_bytes,
        "parts": profiler.parts,
        "spans": profiler.spans,
        "began": profiler.began,
        "probed": probed,
        "last": engine.record.spans(),
        "seconds_by_phase": _by_phase(engine, first + probed),
        "own_by_phase": _by_phase(engine, first + probed, own=True),
        "counted": len(reports.times.counted),
        "evaluation": evaluations.at_end(wanted=evaluate and not preempted),
        "preempted": preempted,
        "save_stall": statistics.median(checkpoints.stalls) if checkpoints is not None and checkpoints.stalls else None,
        "device": engine.device.type,
        "division": engine.strategy.summary,
        "lanes": engine.strategy.lanes(max(1, len(reports.times.counted))),
    }


def _run_steps(
    engine: Engine,
    left: int,
    probed: int,
    profiler: StepProfiler | FlightRecorder,
    reports: StepReports,
    checkpoints: TrainingCheckpoints | None,
    evaluations: Evaluations,
) -> None:
    """Run the steps that are left, and report and save them on the way."""
    first, rank_watch = engine.position, RankWatch(engine)
    requested = time.perf_counter()
    for i, batch in enumerate(engine.data(left)):
        start = time.perf_counter()
        reports.begin(batch, start - requested)
        with _saving_good_weights(reports, checkpoints):
            if i == probed:
                profiler.run(batch)
            else:
                engine.step(batch)
        met = engine.strategy.meets(engine.position)
        seconds = time.perf_counter() - start
        compared = rank_watch.after_step(met=met, skip=(first + probed,))
        evaluations.completed(reports.ran(seconds, met=met, probed=i == probed, compared=compared))
        if met:
            reports.exchange()
            if evaluations.due:
                evaluations.completed(reports.drain())
            stops = evaluations.after_step()
            if checkpoints is not None:
                if checkpoints.saves_now:
                    evaluations.completed(reports.drain())
                if checkpoints.after_step():
                    break
            if stops:
                break
        requested = time.perf_counter()
    reports.drain()


@contextmanager
def _saving_good_weights(reports: StepReports, checkpoints: TrainingCheckpoints | None) -> Iterator[None]:
    """Around what a guard may stop, on all ranks together: the steps before it are reported and saved."""
    try:
        yield
    except StoppedByGuard:
        reports.exchange()
        if checkpoints is not None:
            checkpoints.save_good_weights()
        raise


def _begin(engine: Engine, emit: Emit) -> None:
    """Report before the first step what cannot be done under this plan, or for this model."""
    if engine.rank > 0:
        return
    why = why_no_replicas(engine) if engine.guard.guards.vote else ""
    if why:
        emit({"message": f"--vote: {why}"})
    if engine.left_whole:
        key = f"ep={engine.plan.ep}" if engine.plan.ep > 1 else f"chunk={engine.plan.chunk}"
        emit({"message": f"{key} leaves whole: {_by_reason(engine.left_whole)}"})
    for remark in engine.strategy.remarks:
        emit({"message": remark})
    division = engine.strategy.summary
    if division:
        begins = [f"stages begin at {', '.join(division.stages)}"] if division.stages else []
        for line in (*division.lines(), *begins):
            emit({"message": line})


def _by_reason(left: Mapping[str, str]) -> str:
    """`a, b, c and 9 more (why); d (why)`: blocks that are alike have the same reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in left.items():
        groups.setdefault(reason, []).append(name)
    more = {reason: f" and {len(names) - 3} more" if len(names) > 3 else "" for reason, names in groups.items()}
    return "; ".join(f"{', '.join(names[:3])}{more[reason]} ({reason})" for reason, names in groups.items())


def _by_phase(engine: Engine, probed: int, *, own: bool = False) -> dict[str, float]:
    """The median seconds of each phase over the recorded steps after the warm-up.

    `own`: without the wait for other ranks.
    """
    clock = engine.record.own_seconds if own else engine.record.phase_seconds
    clocks = [clock(n) for n in engine.record.steps if n > probed]
    names = dict.fromkeys(name for clock in clocks for name in clock)
    return {name: statistics.median(clock.get(name, 0.0) for clock in clocks) for name in names}


def _memory(engine: Engine, profiler: StepProfiler | FlightRecorder) -> float:
    """Peak bytes of tensors so far: from CUDA's allocator, or on a CPU from the profiled step."""
    if engine.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(engine.device))
    return profiler.peak_bytes
