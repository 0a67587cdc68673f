"""The engine: one job under one plan, on this rank. `engine.step(batch)` does the same whatever the plan is.

This rank's state is built in core/rank_state.py; core/ runs a step, guards/ and checkpoint/ are added to it here.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..comm.environment import RankInfo, connect, device_of
from ..comm.rank_status import BETWEEN_STEPS, rank_status
from ..core.errors import PlanError
from ..core.job import Job
from ..datasets.loader import Loader
from ..datasets.stream import RankBatch
from ..plans import Plan, check
from ..torchkit.fake_tensors import has_no_values
from .checkpoint import LoadedCheckpoint, Saver, load, saver_for
from .checkpoint.weights import load_weights
from .core.batch_slice import own_batch_slice
from .core.batches_in_flight import BatchesInFlight, CompletedStep
from .core.engine_core import EngineCore
from .core.forward_backward import forward_backward, read_sums
from .core.step_graph import StepGraph
from .guards.guard import Guards, StepGuard
from .numerics.loss_scale import LossScale


def initialize(
    job: Job,
    plan: Plan | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    guards: Guards | None = None,
    flops_per_byte: float | None = None,
) -> Engine:
    """Set a job up on this rank: under `drumline train`, torchrun, srun or mpiexec, in `dl.spawn`, or all alone.

    Without a plan, every rank is a replica. `dtype` casts the model and its data (verification uses float64). `guards`
    say what happens when a number is not finite, and how often replicas are compared. `flops_per_byte` is what a byte
    between two stages of a pipeline costs, in operations of a device, where stages are balanced by counted work.
    """
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    where = connect(backend=plan.backend if plan and plan.backend != "threads" else "auto")
    if plan is None:
        plan = Plan(dp=where.size)
    _check_world(job, plan, where.size)
    device = device_of(where)
    if threads and device.type == "cpu":
        torch.set_num_threads(threads)
    return Engine(job, plan, where=where, device=device, dtype=dtype, guards=guards, flops_per_byte=flops_per_byte)


def _check_world(job: Job, plan: Plan, ranks: int) -> None:
    """Refuse a plan that these ranks, or this job's batches, cannot carry out."""
    check(plan)
    if plan.has_coordinator:
        raise PlanError(
            f"the plan {plan} in a loop of your own",
            rule=f"sync={plan.sync} decides which batch a worker computes, and servers run no batches at all",
            fix="drumline train, or dl.train(job, plan)",
        )
    n = plan.processes
    if n != ranks:
        raise PlanError(
            f"the plan {plan} is for {n} rank{'s' if n > 1 else ''}, but {ranks} were started",
            rule=f"{plan.equation} != {ranks} ranks" if n == plan.ranks else "backend=threads is one process",
            fix=f"dp={ranks}, or start {n} rank{'s' if n > 1 else ''}",
        )
    if plan.micro > job.batch_size:
        raise PlanError(
            f"micro={plan.micro} for batches of {job.batch_size}",
            rule="every micro-batch has at least one sample",
            fix=f"micro={job.batch_size} or less",
        )


class NoCollection:
    """Python's garbage collector waits until the end of a step, when there is less to look at.

    A step makes thousands of short-lived objects, and each thousand would start a collection while a GPU waits.
    Not with micro-batches: cycles of an earlier one may hold memory.
    """

    def __enter__(self) -> None:
        self._runs = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._runs:
            gc.enable()


class Engine(EngineCore):
    """A job under a plan. Made by `initialize`."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        *,
        where: RankInfo,
        device: torch.device,
        dtype: torch.dtype | None,
        guards: Guards | None = None,
        flops_per_byte: float | None = None,
    ) -> None:
        self.guard = StepGuard(guards or Guards(), plan)
        super().__init__(job, plan, where=where, device=device, dtype=dtype, flops_per_byte=flops_per_byte)
        # a dry run, without values, has nothing to replay
        self.graph = StepGraph(self) if plan.graph and not has_no_values(self.pieces[0].value) else None
        """The captured step."""
        self.note = ""
        """A remark on the last step: that its loss is a spike, or why it was skipped."""
        self.saver: Saver | None = None
        self._completed: deque[CompletedStep] = deque(maxlen=max(64, 2 * plan.pp))

    @property
    def skipped(self) -> int:
        """Steps that were not applied, because they were not finite: of all ranks, or of this one if it steps alone."""
        if self.strategy.steps_alone:
            return len(self.guard.skipped)
        return self.position - self.steps - self.steps_in_flight

    @property
    def completed_count(self) -> int:
        """Number of steps that `completed_steps` has left."""
        return len(self._completed)

    def completed_steps(self) -> Iterator[CompletedStep]:
        """The steps completed since this was asked last. While one is handled, the engine's numbers are its own.

        A step completes the batch it is given; in a pipeline that does not drain, an earlier one, or none.
        """
        while self._completed:
            done = self._completed.popleft()
            self.grad_norm, self.strategy.staleness, self.note = done.grad_norm, done.staleness, done.note
            yield done

    # -- a step

    def data(self, steps: int | None = None) -> Iterator[RankBatch]:
        """This rank's slices of the next batches: of the job's number of steps unless `steps` is given."""
        with Loader(self.stream, pin=self.device.type == "cuda") as loader:
            for _ in range(self.job.steps if steps is None else steps):
                with self.phase("data"):
                    batch = loader.batch(self.position)
                yield batch

    def step(self, batch: Any) -> float:
        """Run one optimizer step on this rank's slice; returns the mean loss over all ranks that step together.

        Takes what `data()` yields, or (input, target) of the caller's own loader. Under `sync=local:k` and `gossip`
        each rank steps by itself: the loss is that of its slice, 0 if that has no samples. In a pipeline that does not
        drain, it is that of the last batch that was completed; nan until there is one.
        """
        with NoCollection() if self.plan.micro == 1 else nullcontext():
            loss = self._step(batch)
        rank_status().phase(BETWEEN_STEPS)
        return loss

    def _step(self, batch: Any) -> float:
        batch = batch if isinstance(batch, RankBatch) else own_batch_slice(self, batch)
        rank_status().step(batch.step)
        self.record.begin(batch.step)
        if self.in_flight is not None:
            return self._feed(self.in_flight, batch)
        if self.graph is None or not self.graph.is_captured:
            self.buffer_snapshot.save()
        self.note = ""
        while True:
            loss, factor, done = self._compute(batch)
            if self.guard.is_finite(loss, self.grad_norm):
                self.apply(loss, factor, done=done)
                break
            if self.scaler is None or not math.isfinite(loss):
                self._skip(batch, loss)
                break
            self._overflowed(self.scaler)
        self.position += 1
        if self.strategy.steps_alone:
            self._exchange()
        self.record.end()
        self._completed.append(CompletedStep(batch.step, loss, self.grad_norm, note=self.note))
        return loss

    def _compute(self, batch: RankBatch) -> tuple[float, float, bool]:
        """The gradients of a batch: mean loss, factor to multiply them by, and whether the update is done already."""
        early, graph = self._may_update_early(), self.graph
        if graph is None:
            return self._update_early(batch) if early else (*self.gradients_of(batch), False)
        if not graph.is_ready:
            with graph.plain_step():
                return self._update_early(batch) if early else (*self.gradients_of(batch), False)
        loss, factor = read_sums(self, graph.run(batch, update=early))
        if not math.isfinite(self.grad_norm):
            graph.show_gradients()
        return loss, factor, early

    def _feed(self, in_flight: BatchesInFlight, batch: RankBatch) -> float:
        """A step that completes an earlier batch."""
        completed = in_flight.feed(batch)
        self.position += 1
        self.record.end()
        self._note_completed(completed)
        return completed[-1].loss if completed else math.nan

    def drain(self) -> None:
        if self.in_flight is not None:
            self._note_completed(self.in_flight.drain())

    def _note_completed(self, completed: list[CompletedStep]) -> None:
        for done in completed:
            self.grad_norm, self.strategy.staleness, self.note = done.grad_norm, done.staleness, ""
            self._completed.append(replace(done, note=self.guard.spike(done.loss)))

    def apply(self, loss: float, factor: float, *, done: bool = False) -> None:
        """Finish a good step: compare the replicas if they are due, and update, unless the update is `done`."""
        rests = self.strategy.steps_alone and not self.loss_weight  # a replica without samples
        # a single rank has nothing left to send after its update, and a reading of a GPU's clock costs its host time
        with self.phase("optimizer") if self.ranks > 1 or not done else nullcontext():
            if rests and not done:
                self.update.rest()
            elif not done:
                self.guard.compare(self)
                self.update.apply(factor, self.grad_norm, self.gradients_ready)
            else:
                self.update.follow_weights()
            self.update.finish()
        if self.scaler:
            self.scaler.on_good_step()
        if self.graph is not None:
            self.graph.note_step(good=True)
        self.steps += 1
        self.note = "" if rests else self.guard.spike(loss)

    def _skip(self, batch: RankBatch, loss: float) -> None:
        """The step is not finite: find out why, and stop the run, or leave the weights as they are."""
        if self.graph is not None:
            self.graph.note_step(good=False)
        self.note = f"skipped: {self.guard.handle_nonfinite(self, batch, loss, self.grad_norm)}"
        self.loss_weight = 0.0
        if self.strategy.steps_alone:  # others have applied theirs: the step counts, and this replica rests
            self.update.rest()
            self.update.finish()
            self.steps += 1

    def _exchange(self) -> None:
        """Exchange weights with other replicas, if it is time; where all meet, raise what stops one of them."""
        with self.phase("communication"):
            self.strategy.after_step(self.position)
            if self.strategy.meets(self.position):
                self.guard.at_meeting(self)

    def average_replicas(self) -> None:
        """Make all replicas their average, where each steps by itself; all ranks together. Otherwise nothing to do."""
        super().average_replicas()
        if self.strategy.steps_alone:
            self.guard.at_meeting(self)

    def _may_update_early(self) -> bool:
        """Whether a GPU may be given the update before the host knows whether the step is good.

        The GPU then decides by itself. The host must know first where replicas are compared, and where a caller looks
        at the gradients.
        """
        watched = "gradients_ready" in vars(self) or self.guard.compares(self.steps)
        return self.update.decides_on_device and not watched

    def _update_early(self, batch: RankBatch) -> tuple[float, float, bool]:
        """`gradients_of`, with the update before the host waits; the last value: whether there was an update.

        There is none where some parameter was not reached: parameters that no rank has reached are left out.
        """
        sums = forward_backward(self, batch)
        reached = self.strategy.unreached() == 0 and (self.ranks == 1 or not self.strategy.counts_unreached)
        if reached:
            with self.phase("optimizer"):
                self.update.apply_if_finite(sums.values, sums.samples, sums.scale)
        loss, factor = read_sums(self, sums)
        return loss, factor, reached

    def _overflowed(self, scaler: LossScale) -> None:
        """The gradients overflowed because the fp16 scale was too large: lower it, and run the batch again."""
        if self.graph is not None:
            self.graph.note_step(good=False)
        self.strategy.drop_gradients()
        self.buffer_snapshot.restore()
        scaler.on_overflow()

    # -- checkpoints

    def save(self, folder: str | Path, *, keep: int = 2, wait: bool = True) -> Path | None:
        """Save everything to a new checkpoint in `folder`, all ranks together; the newest `keep` stay there.

        Without `wait` this returns when everything is copied, and training continues while it is written; errors of the
        writing are raised by the next save, or by `finish_saves`.
        """
        return self.saver_for(folder, keep=keep).save(wait=wait)

    def saver_for(self, folder: str | Path, *, keep: int) -> Saver:
        """The saver of a folder, kept from save to save."""
        self.saver = saver_for(self, folder, keep=keep, current=self.saver)
        return self.saver

    def finish_saves(self) -> None:
        """Wait for what is being written, raise its errors, and let other jobs write to the folder."""
        saver, self.saver = self.saver, None
        if saver is not None:
            saver.close()

    def load(self, path: str | Path, *, other_data: bool = False) -> LoadedCheckpoint:
        """Continue from a checkpoint, or from the newest undamaged one in a folder, saved under any plan."""
        if self.in_flight is not None:
            self.in_flight.recover()
        self.drain()
        if self.graph is not None:
            self.graph.reset()
        return load(self, path, other_data=other_data)

    def load_weights(self, path: str | Path, *, strict: bool = True) -> None:
        """Load weights alone: of a checkpoint, a safetensors file, a Hugging Face folder, or a .pt file."""
        load_weights(self, path, strict=strict)
