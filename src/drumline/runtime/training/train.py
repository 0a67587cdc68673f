"""Trains a job on this rank and reports every step to the launcher."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...comm.rank_status import rank_status
from ...core.errors import StoppedByGuard
from ...datasets.stream import RankBatch
from ...tracing.op_costs import tensors
from ..engine import Engine
from ..guards.replicas import why_no_replicas
from .checkpoint_policy import CheckpointPolicy, TrainingCheckpoints, steps_left
from .slowest_rank import EVERY, slowest_rank
from .step_profiler import StepProfiler

WARM_UP = 2
"""Steps that do not count for the measured step time; the next one is profiled."""

Emit = Callable[[dict[str, Any]], None]


def train(
    engine: Engine, emit: Emit, *, steps: int, evaluate: bool, saves: CheckpointPolicy | None = None
) -> dict[str, Any]:
    """Run one rank's whole training; the first rank calls `emit` with a record of every step."""
    checkpoints = TrainingCheckpoints(engine, saves, lambda text: emit({"message": text})) if saves else None
    if checkpoints is not None:
        checkpoints.begin()
    left = steps_left(engine, steps)
    profiler = StepProfiler(engine)
    probed = min(WARM_UP, left - 1)
    seconds: list[float] = []
    waits: list[float] = []
    _begin(engine, emit)
    first = engine.position
    requested = time.perf_counter()
    for i, batch in enumerate(engine.data(left)):
        waits.append(time.perf_counter() - requested)
        start = time.perf_counter()
        try:
            loss = profiler.run(batch) if i == probed else engine.step(batch)
        except StoppedByGuard:
            if checkpoints is not None:
                checkpoints.save_good_weights()
            raise
        seconds.append(time.perf_counter() - start)
        numbers = engine.record.steps[-EVERY:] if i % EVERY == EVERY - 1 else ()
        slow = slowest_rank(engine, [n for n in numbers if n != first + probed]) if numbers else None
        if engine.rank == 0:
            emit(
                {
                    "step": batch.step,
                    "loss": loss,
                    "grad_norm": engine.grad_norm,
                    "seconds": seconds[-1],
                    "samples": batch.samples,
                    "tokens": tokens(batch),
                    "memory_bytes": _memory(engine, profiler),
                    "data_seconds": waits[-1],
                    "probed": i == probed,
                    "slowest": slow,
                    "skipped": engine.skipped,
                    "note": engine.note,
                    "checkpoint_age": _checkpoint_age(engine),
                }
            )
        if checkpoints is not None and checkpoints.after_step():
            break
        requested = time.perf_counter()
    rank_status().place("ending")
    preempted = checkpoints is not None and checkpoints.preempted
    if checkpoints is not None:
        checkpoints.end()
    counted = [t for i, t in enumerate(seconds) if i > probed] or seconds[-1:]
    return {
        "step_seconds": statistics.median(counted),
        "data_seconds": statistics.median(waits),
        "peak_bytes": profiler.peak_bytes,
        "parts": profiler.parts,
        "spans": profiler.spans,
        "probed": probed,
        "last": engine.record.spans(),
        "seconds_by_phase": _by_phase(engine, first + probed),
        "own_by_phase": _by_phase(engine, first + probed, own=True),
        "counted": len([t for i, t in enumerate(seconds) if i > probed]),
        "evaluation": engine.evaluate() if evaluate and not preempted else {},
        "preempted": preempted,
        "save_stall": statistics.median(checkpoints.stalls) if checkpoints is not None and checkpoints.stalls else None,
        "device": engine.device.type,
        "division": engine.strategy.summary,
        "lanes": engine.strategy.lanes(len(counted)),
    }


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


def tokens(batch: RankBatch) -> int:
    """Tokens in the whole batch, if its inputs are rows of integers; else 0."""
    rows = [t for t in tensors(batch.micros[0].input) if t.dim() == 2] if batch.micros else []
    if not rows or rows[0].is_floating_point() or rows[0].dtype == torch.bool:
        return 0
    return batch.samples * rows[0].shape[1]


def _by_phase(engine: Engine, probed: int, *, own: bool = False) -> dict[str, float]:
    """The median seconds of each phase over the recorded steps after the warm-up.

    `own`: without the wait for other ranks.
    """
    clock = engine.record.own_seconds if own else engine.record.phase_seconds
    clocks = [clock(n) for n in engine.record.steps if n > probed]
    names = dict.fromkeys(name for clock in clocks for name in clock)
    return {name: statistics.median(clock.get(name, 0.0) for clock in clocks) for name in names}


def _checkpoint_age(engine: Engine) -> float | None:
    """Seconds since the newest checkpoint of this run was completed."""
    last = engine.saver.last if engine.saver is not None else None
    try:
        return None if last is None else max(0.0, time.time() - last.stat().st_mtime)
    except OSError:  # it was moved or removed
        return None


def _memory(engine: Engine, profiler: StepProfiler) -> float:
    """Peak bytes of tensors so far: from CUDA's allocator, or on a CPU from the profiled step."""
    if engine.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(engine.device))
    return profiler.peak_bytes
