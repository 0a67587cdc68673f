"""Steps under a schedule that does not drain: feeding a batch runs it as far as it can go, and completes an older one.

The numbers of a batch (loss, weight, gradient norm) are summed over the stages when each has its gradients, and read
when the first stage, the last to have them, applies the batch. A batch that is not finite ends the run: later batches
are in flight on weights that other stages have updated, so it cannot be skipped, and no rank has the weights before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...core.errors import GaveUp, JobError, PlanError
from ...core.job import Job
from ...datasets.seeding import mix_seed
from ...datasets.stream import RankBatch
from ...plans import Plan
from ...schedules import PIPEDREAM
from ...torchkit.fake_tensors import agreed_numbers
from ..parallel.asynchronous_stages import AsynchronousStages, BatchInFlight
from ..parallel.model_parallel import ModelParallel
from ..pipeline.batch_sums import OpenSum
from ..state.json_exchange import gather_json
from ..state.weights import seed_everything
from ..strategies.strategy import StepContext

if TYPE_CHECKING:
    from .engine_core import EngineCore


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A batch that has been applied on every rank."""

    step: int
    loss: float
    """Mean over the batch, on the weights of its forwards."""
    grad_norm: float
    staleness: tuple[int, ...] = ()
    """By pipeline stage; empty where gradients are of the newest weights."""
    note: str = ""


@dataclass(slots=True, eq=False)
class _Sums:
    """The numbers of a batch on their way."""

    open: OpenSum
    """Sum of losses, sum of their weights, unreached parameters, squared norm; requests to stop; staleness by stage."""
    own: list[float]
    finite: bool
    """Whether the loss and the gradients of this rank are."""
    bad: tuple[str, ...]
    """Parameters of this rank whose gradient is not finite."""
    read: tuple[float, float, float, Sequence[float]] | None = None


def refuse_clipping(job: Job, plan: Plan) -> None:
    """Refuse to clip where stages apply a batch at different times."""
    if job.clip is not None and plan.keeps_batches_in_flight and plan.schedule == PIPEDREAM:
        raise PlanError(
            f"clip={job.clip:g} with schedule=pipedream",
            where=f"plan {plan}",
            rule="a stage applies a batch before the earlier stages have its gradients, so their norm is not known",
            fix="schedule=pipedream-2bw with micro >= pp, schedule=1f1b, or a job without clip",
        )


class BatchesInFlight:
    """Runs the steps of one engine while batches are in flight."""

    def __init__(self, engine: EngineCore, strategy: ModelParallel) -> None:
        self._engine = engine
        self.stages = AsynchronousStages(strategy)
        self._sums: dict[BatchInFlight, _Sums] = {}
        self._failed: BatchInFlight | None = None
        """The first batch that is not finite."""
        self._error: GaveUp | None = None
        """Why the run has ended: stages have applied different batches."""
        self.stop_wanted = False
        """Whether this rank was asked to stop."""
        self.stop_agreed = False
        """Whether any rank was, as of the last completed batch: all ranks have the same answer."""

    @property
    def count(self) -> int:
        """Batches in flight."""
        return len(self.stages.batches)

    def feed(self, batch: RankBatch) -> list[CompletedStep]:
        """Run a batch as far as it can go; returns the steps that this completes."""
        self._refuse_after_failure()
        applied = self.stages.feed(batch, self._context(), self._on_gradients, self._on_update)
        return self._complete(applied)

    def drain(self) -> list[CompletedStep]:
        """Complete all batches in flight."""
        self._refuse_after_failure()
        if not self.count:
            return []
        applied = self.stages.drain(self._context(), self._on_gradients, self._on_update)
        completed = self._complete(applied)
        self.stages.restart()
        return completed

    def recover(self) -> None:
        """A checkpoint is about to be loaded: the stages will have one model again."""
        self._error = self._failed = None

    def _refuse_after_failure(self) -> None:
        """Neither train nor save nor evaluate after the run has ended."""
        if self._error is not None:
            raise self._error

    def _context(self) -> StepContext:
        engine = self._engine

        def seed(micro: int, *stage: int) -> None:
            seed_everything(mix_seed(engine.job.seed, engine.position, micro, engine.data_index, *stage))

        return StepContext(engine.plan.precision, engine.device, 1.0, engine.loss_of, engine.phase, seed)

    # -- one batch on this rank

    def _on_gradients(self, batch: BatchInFlight) -> None:
        """The gradients of a batch are complete: start to sum its numbers over the ranks."""
        engine = self._engine
        with engine.phase("communication"):
            unreached = self.stages.collect_gradients(batch)
            zero = torch.zeros((), dtype=torch.float64, device=engine.device)
            counted = batch.losses if engine.strategy.counts_loss else []
            loss, weight = sum((a for a, _ in counted), zero), sum((b for _, b in counted), zero)
            engine.local_loss = loss
            square = engine.update.own_square() * float(engine.data_index == 0)  # replicas have the same
            finite = self.stages.joint or self._is_finite(loss, square)
            bad = () if finite else self._bad_gradients(batch)
            own = [float(unreached), float(self.stop_wanted), *self._own_staleness(batch)]
            missed, *others = torch.tensor(own, dtype=torch.float64, device=engine.device).unbind()
            values = torch.stack([loss, weight, missed, square, *others])
            self._sums[batch] = _Sums(self.stages.sum_numbers(values), own, finite, bad)
            self.stages.hide()

    def _is_finite(self, loss: torch.Tensor, square: torch.Tensor) -> bool:
        """Whether this rank's numbers are finite: where a batch is applied before those of all ranks are known."""
        numbers = self._engine.read_numbers(torch.stack([loss, loss, loss, square]))
        return all(map(math.isfinite, numbers))

    def _bad_gradients(self, batch: BatchInFlight) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, g in self.stages.gradients_of(batch) if not bool(g.isfinite().all())))

    def _own_staleness(self, batch: BatchInFlight) -> list[float]:
        """By stage, with zeros for the other ranks to add to."""
        mine = self._engine.data_index == 0
        return [float(batch.staleness) if mine and s == self.stages.stage else 0.0 for s in range(self.stages.stages)]

    def _on_update(self, batch: BatchInFlight) -> None:
        """Apply a batch on this rank: with the norm of all ranks if all apply it now, else by itself."""
        engine, factor, norm = self._engine, 1.0, 0.0
        if self.stages.joint:
            loss, norm, factor, _ = self._read(batch)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._failed = self._failed or batch
                self._sums[batch].bad = self._bad_gradients(batch)
        elif not self._sums[batch].finite:
            self._failed = self._failed or batch
        if self._failed is not None:
            self.stages.drop(batch)
            return
        with engine.phase("optimizer"):
            with self.stages.applying(batch):
                engine.update.apply(factor, norm, engine.gradients_ready)
            engine.update.advance_schedule()

    def _read(self, batch: BatchInFlight) -> tuple[float, float, float, Sequence[float]]:
        """Loss, gradient norm, the factor to multiply gradients by, and the other numbers, over all ranks."""
        sums = self._sums[batch]
        if sums.read is not None:
            return sums.read
        with self._engine.phase("communication"):
            values = sums.open.wait()
            total, weight, _, square = self._engine.read_numbers(values[:4])
            rest = agreed_numbers(values[4:], sums.own[1:])
        if not weight:
            raise JobError(f"step {batch.step}: the batch has no weight", rule="the weights of a batch add up to > 0")
        factor = batch.samples / weight if batch.weighted and self.stages.joint else 1.0
        sums.read = total / weight, factor * math.sqrt(square) if square >= 0 else math.nan, factor, rest
        return sums.read

    # -- batches that are done on all ranks

    def _complete(self, count: int) -> list[CompletedStep]:
        completed = []
        for _ in range(count):
            batch = self.stages.batches[0]
            loss, norm, _, (stop, *stale) = self._read(batch)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._stop(batch, loss, norm)
            self.stages.batches.popleft()
            del self._sums[batch]
            self.stages.confirm(batch)
            self.stop_agreed = stop > 0
            self._engine.steps += 1
            completed.append(CompletedStep(batch.step, loss, norm, tuple(round(n) for n in stale)))
        return completed

    def _stop(self, batch: BatchInFlight, loss: float, norm: float) -> None:
        """End the run, on all ranks: let the batches in flight end without updates, and name the bad one."""
        engine = self._engine
        self._failed = self._failed or batch
        self.stages.drain(self._context(), self._on_gradients, self._on_update)
        for other in self.stages.batches:
            self._sums[other].open.wait()
        bad = self._sums[batch].bad
        self.stages.batches.clear()
        self._sums.clear()
        self.stages.restart()
        named: list[list[str]] = gather_json(list(bad), engine.group, engine.device)
        where = "; ".join(f"stage {r // engine.data_ranks}: the gradient of {n[0]!r}" for r, n in enumerate(named) if n)
        what = f"the loss is {loss} at step {batch.step}"
        if math.isfinite(loss):
            what = f"non-finite gradients at step {batch.step} (norm {norm}, loss {loss:.4g})"
        self._error = GaveUp(
            what,
            where=where or f"plan {engine.plan}",
            rule="later batches were in flight, and stages have applied different ones: nothing is saved",
            fix="--resume from the last checkpoint, with a lower learning rate or schedule=1f1b, which can skip a step",
        )
        raise self._error
