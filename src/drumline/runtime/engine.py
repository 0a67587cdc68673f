"""The engine: one job under one plan, on this rank. `engine.step(batch)` does the same whatever the plan is.

This rank's state is built in core/rank_state.py; core/ runs a step, guards/ and checkpoint/ are added to it here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..comm.environment import RankInfo, connect, device_of
from ..comm.rank_status import rank_status
from ..core.errors import PlanError
from ..core.job import Job
from ..datasets.loader import Loader
from ..datasets.stream import RankBatch
from ..plans import Plan, check
from .checkpoint import LoadedCheckpoint, Saver, load, saver_for
from .checkpoint.weights import load_weights
from .core.batch_slice import own_batch_slice
from .core.engine_core import EngineCore
from .core.forward_backward import forward_backward, read_sums
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
        self.note = ""
        """A remark on the last step: that its loss is a spike, or why it was skipped."""
        self.saver: Saver | None = None

    @property
    def skipped(self) -> int:
        """Steps that were not applied, because they were not finite."""
        return self.position - self.steps

    # -- a step

    def data(self, steps: int | None = None) -> Iterator[RankBatch]:
        """This rank's slices of the next batches: of the job's number of steps unless `steps` is given."""
        with Loader(self.stream, workers=self.job.workers, pin=self.device.type == "cuda") as loader:
            for _ in range(self.job.steps if steps is None else steps):
                with self.phase("data"):
                    batch = loader.batch(self.position)
                yield batch

    def step(self, batch: Any) -> float:
        """Run one optimizer step on this rank's slice; returns the mean loss over all ranks.

        Takes what `data()` yields, or (input, target) of the caller's own loader.
        """
        batch = batch if isinstance(batch, RankBatch) else own_batch_slice(self, batch)
        rank_status().step(batch.step)
        self.record.begin(batch.step)
        self.buffer_snapshot.save()
        self.note = ""
        while True:
            done = False
            if self._may_update_early():
                loss, factor, done = self._update_early(batch)
            else:
                loss, factor = self.gradients_of(batch)
            if self.guard.is_finite(loss, self.grad_norm):
                self.apply(loss, factor, done=done)
                break
            if self.scaler is None or not math.isfinite(loss):
                self.note = f"skipped: {self.guard.handle_nonfinite(self, batch, loss, self.grad_norm)}"
                break
            self._overflowed(self.scaler)
        self.position += 1
        self.record.end()
        return loss

    def apply(self, loss: float, factor: float, *, done: bool = False) -> None:
        """Finish a good step: compare the replicas if they are due, and update, unless the update is `done`."""
        with self.phase("optimizer"):
            if not done:
                self.guard.compare(self)
                self.update.apply(factor, self.grad_norm, self.gradients_ready)
            self.update.finish()
        if self.scaler:
            self.scaler.on_good_step()
        self.steps += 1
        self.note = self.guard.spike(loss)

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
        return load(self, path, other_data=other_data)

    def load_weights(self, path: str | Path, *, strict: bool = True) -> None:
        """Load weights alone: of a checkpoint, a safetensors file, a Hugging Face folder, or a .pt file."""
        load_weights(self, path, strict=strict)
