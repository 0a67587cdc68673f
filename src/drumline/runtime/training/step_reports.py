"""Reports the steps of a training to the launcher as they are completed, each with its own share of the time.

Most steps complete their batch, and are reported at once. In a pipeline that does not drain, a step completes an
earlier batch, or none; then the time until a batch is completed is that batch's. Ranks that step alone know the losses
of their own slices: when they meet, they exchange those of the steps since the last meeting, and the first rank reports
all these steps, with the mean loss over all samples, the mean norm of the replicas' gradients, its own times, and every
replica's remarks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...core.errors import JobError
from ...datasets.stream import RankBatch
from ...tracing.op_costs import tensors
from ..core.batches_in_flight import CompletedStep
from ..engine import Engine
from ..state.json_exchange import gather_json
from .measured_steps import MeasuredSteps
from .slowest_rank import RankComparison

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _BegunStep:
    samples: int
    tokens: int
    data_seconds: float


class StepReports:
    """The steps of one rank; the first rank emits a record of each. Times up to step `ignored` do not count."""

    def __init__(self, engine: Engine, emit: Emit, memory: Callable[[], float], *, ignored: int) -> None:
        self._engine, self._emit, self._memory = engine, emit, memory
        self.times = MeasuredSteps(ignored)
        self.waits: list[float] = []
        """Seconds of waiting for data, by step."""
        self._began = time.perf_counter()
        self._begun: dict[int, _BegunStep] = {}
        self._spent = 0.0
        """Seconds since the last completed step."""
        self._waiting: list[dict[str, Any]] = []
        self._numbers: list[list[float]] = []
        """By step: sum and weight of this rank's loss, norm of its gradients, steps skipped so far, whether it has a
        note."""

    def begin(self, batch: RankBatch, data_seconds: float) -> None:
        """A batch is about to be given to the engine."""
        self.waits.append(data_seconds)
        self._begun[batch.step] = _BegunStep(batch.samples, tokens(batch), data_seconds)

    def ran(
        self, seconds: float, *, met: bool = True, probed: bool = False, compared: RankComparison | None = None
    ) -> list[CompletedStep]:
        """The engine has run for some time: report what it has completed, at once where ranks step together.

        `met`: all ranks have exchanged messages; `probed`: under the profiler.
        """
        engine = self._engine
        self._spent += seconds
        each = self._spent / engine.completed_count if engine.completed_count else 0.0
        completed = []
        for done in engine.completed_steps():
            completed.append(done)
            self._spent = 0.0
            self.times.add(each, met=met)
            begun = self._begun.pop(done.step)
            self._waiting.append(
                {
                    "step": done.step,
                    "loss": done.loss,
                    "grad_norm": done.grad_norm,
                    "seconds": each,
                    "samples": begun.samples,
                    "tokens": begun.tokens,
                    "memory_bytes": self._memory(),
                    "data_seconds": begun.data_seconds,
                    "probed": probed,
                    "skipped": engine.skipped,
                    "note": done.note,
                    "checkpoint_age": _checkpoint_age(engine) if engine.rank == 0 else None,
                    "elapsed": time.perf_counter() - self._began,
                    "staleness": done.staleness,
                    **(compared.report() if compared else {}),
                }
            )
            if engine.step_ranks != engine.ranks:
                self._keep_numbers(self._waiting[-1])
        if engine.step_ranks == engine.ranks:
            self._report()
        return completed

    def drain(self) -> list[CompletedStep]:
        """Complete what is in flight, and report it."""
        if not self._engine.steps_in_flight:
            return []
        start = time.perf_counter()
        self._engine.drain()
        return self.ran(time.perf_counter() - start)

    def _keep_numbers(self, report: dict[str, Any]) -> None:
        engine, norm = self._engine, report["grad_norm"]
        weight = engine.loss_weight
        loss = report["loss"] * weight if weight else 0.0
        self._numbers.append(
            [loss, weight, norm if math.isfinite(norm) else 0.0, engine.skipped, float(bool(report["note"]))]
        )

    def exchange(self) -> None:
        """All ranks have met: report the steps since the last meeting."""
        if not self._numbers:
            return
        engine = self._engine
        sums = torch.tensor(self._numbers, dtype=torch.float64, device=engine.device)
        dist.all_reduce(sums, group=engine.group)
        rows = sums.tolist()
        own = [report["note"] for report in self._waiting]
        notes = gather_json(own, engine.group, engine.device) if any(row[4] for row in rows) else [own]
        for i, (loss, weight, norm, skipped, _) in enumerate(rows):
            report = self._waiting[i]
            if not weight and not skipped:
                raise JobError(
                    f"step {report['step']}: the batch has no weight", rule="the weights of a batch add up to > 0"
                )
            report["loss"] = loss / weight if weight else math.nan
            report["grad_norm"], report["skipped"] = norm / engine.ranks, round(skipped)
            report["note"] = "; ".join(f"rank {rank}: {row[i]}" for rank, row in enumerate(notes) if row[i])
        self._numbers.clear()
        self._report()

    def _report(self) -> None:
        if self._engine.rank == 0:
            for report in self._waiting:
                self._emit(report)
        self._waiting.clear()


def tokens(batch: RankBatch) -> int:
    """Tokens in the whole batch, if its inputs are rows of integers; else 0."""
    rows = [t for t in tensors(batch.micros[0].input) if t.dim() == 2] if batch.micros else []
    if not rows or rows[0].is_floating_point() or rows[0].dtype == torch.bool:
        return 0
    return batch.samples * rows[0].shape[1]


def _checkpoint_age(engine: Engine) -> float | None:
    """Seconds since the newest checkpoint of this run was completed."""
    last = engine.saver.last if engine.saver is not None else None
    try:
        return None if last is None else max(0.0, time.time() - last.stat().st_mtime)
    except OSError:  # it was moved or removed
        return None
