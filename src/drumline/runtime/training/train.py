"""Trains a job on this rank and tells the launcher about every step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...datasets.stream import RankBatch
from ...tracing.op_costs import tensors
from ..engine import Engine
from ..guards.replicas import why_no_replicas
from .checkpoint_policy import CheckpointPolicy, TrainingCheckpoints, steps_left
from .slowest_rank import EVERY, slowest_rank
from .step_profiler import StepProfiler

WARM_UP = 2
"""Steps that are not counted in the measured step time; the next one is looked at under the profiler."""

Emit = Callable[[dict[str, Any]], None]


def train(
    engine: Engine, emit: Emit, *, steps: int, evaluate: bool, saves: CheckpointPolicy | None = None
) -> dict[str, Any]:
    """One rank's whole run: `emit` gets a record per step from the first rank."""
    keeper = TrainingCheckpoints(engine, saves, lambda text: emit({"said": text})) if saves is not None else None
    if keeper is not None:
        keeper.begin()
    left = steps_left(engine, steps)
    probe = StepProfiler(engine)
    probed = min(WARM_UP, left - 1)
    seconds: list[float] = []
    waits: list[float] = []
    _begin(engine, emit)
    first = engine.position
    asked = time.perf_counter()
    for i, batch in enumerate(engine.data(left)):
        waits.append(time.perf_counter() - asked)
        start = time.perf_counter()
        loss = probe.run(batch) if i == probed else engine.step(batch)
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
                    "memory_bytes": _memory(engine, probe),
                    "data_seconds": waits[-1],
                    "probed": i == probed,
                    "slowest": slow,
                    "skipped": engine.skipped,
                    "note": engine.note,
                    "checkpoint_age": _checkpoint_age(engine),
                }
            )
        if keeper is not None and keeper.after_step():
            break
        asked = time.perf_counter()
    preempted = keeper is not None and keeper.preempted
    if keeper is not None:
        keeper.end()
    counted = [t for i, t in enumerate(seconds) if i > probed] or seconds[-1:]
    return {
        "step_seconds": statistics.median(counted),
        "data_seconds": statistics.median(waits),
        "peak_bytes": probe.peak_bytes,
        "parts": probe.parts,
        "spans": probe.spans,
        "probed": probed,
        "last": engine.record.spans(),
        "seconds_by_phase": _by_phase(engine, first + probed),
        "own_by_phase": _by_phase(engine, first + probed, own=True),
        "counted": len([t for i, t in enumerate(seconds) if i > probed]),
        "evaluation": engine.evaluate() if evaluate and not preempted else {},
        "preempted": preempted,
        "save_stall": statistics.median(keeper.stalls) if keeper is not None and keeper.stalls else None,
        "device": engine.device.type,
        "division": engine.strategy.summary,
        "lanes": engine.strategy.lanes(len(counted)),
    }


def _begin(engine: Engine, emit: Emit) -> None:
    """Say before the first step what was asked for and cannot be done under this plan, or for this model."""
    if engine.rank > 0:
        return
    why = why_no_replicas(engine) if engine.guard.guards.vote else ""
    if why:
        emit({"said": f"--vote: {why}"})
    if engine.left_whole:
        key = f"ep={engine.plan.ep}" if engine.plan.ep > 1 else f"chunk={engine.plan.chunk}"
        emit({"said": f"{key} leaves whole: {_by_reason(engine.left_whole)}"})
    division = engine.strategy.summary
    if division:
        begins = [f"stages begin at {', '.join(division.stages)}"] if division.stages else []
        for line in (*division.lines(), *begins):
            emit({"said": line})


def _by_reason(left: Mapping[str, str]) -> str:
    """`a, b, c and 9 more (why); d (why)`: blocks that are alike have the same reason."""
    found: dict[str, list[str]] = {}
    for name, reason in left.items():
        found.setdefault(reason, []).append(name)
    more = {reason: f" and {len(names) - 3} more" if len(names) > 3 else "" for reason, names in found.items()}
    return "; ".join(f"{', '.join(names[:3])}{more[reason]} ({reason})" for reason, names in found.items())


def tokens(batch: RankBatch) -> int:
    """Tokens in the whole batch, where its inputs are rows of whole numbers; else 0."""
    found = [t for t in tensors(batch.micros[0].input) if t.dim() == 2] if batch.micros else []
    if not found or found[0].is_floating_point() or found[0].dtype == torch.bool:
        return 0
    return batch.samples * found[0].shape[1]


def _by_phase(engine: Engine, probed: int, *, own: bool = False) -> dict[str, float]:
    """The median seconds of each phase over the steps that are remembered, without those that were not yet warm.

    `own`: without the wait for other ranks.
    """
    clock = engine.record.own_seconds if own else engine.record.phase_seconds
    clocks = [clock(n) for n in engine.record.steps if n > probed]
    names = dict.fromkeys(name for clock in clocks for name in clock)
    return {name: statistics.median(clock.get(name, 0.0) for clock in clocks) for name in names}


def _checkpoint_age(engine: Engine) -> float | None:
    """Seconds since the newest checkpoint of this run was complete."""
    last = engine.saver.last if engine.saver is not None else None
    try:
        return None if last is None else max(0.0, time.time() - last.stat().st_mtime)
    except OSError:  # somebody has moved it
        return None


def _memory(engine: Engine, probe: StepProfiler) -> float:
    """Most bytes of tensors alive so far: CUDA's allocator knows it at any time, on a CPU the profiled step tells."""
    if engine.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(engine.device))
    return probe.peak_bytes
