"""The loop that DeepSpeed's users know: `out = engine(x)`, `engine.backward(loss)`, `engine.step()`.

Every micro-batch runs through all three; the optimizer steps with the last micro-batch of a batch. The gradient is the
mean over the micro-batches and the ranks, each counted once, as DeepSpeed has it. That is the mean over the samples
where they all have the same number of samples; a ragged last batch weighs its samples more. `engine.step(batch)` of a
`Job` weighs every sample alike, whatever the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import GaveUp, JobError
from ...datasets.stream import mix
from ...plans.deepspeed import Imported
from ..engine import Engine
from ..precision import computing, multiplying


class Triple:
    """An engine whose steps are taken apart. `triple.engine` has all the rest: data, checkpoints, evaluation."""

    def __init__(self, engine: Engine, imported: Imported) -> None:
        self.engine, self.imported = engine, imported
        self.micro_steps = 0
        """Micro-batches so far."""
        self.skipped_steps = 0
        """Steps that were left out because their gradients were not finite."""
        self.mean_loss = 0.0
        """Of the last step, over its micro-batches and all ranks."""
        self._open: ExitStack | None = None
        """What spans the forward and the backward of a micro-batch."""
        self._ready = False
        """Whether the gradients of this micro-batch are there."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
        """The losses of this batch so far, and the parameters that its backwards have missed."""
        self._row = 0
        """Steps left out one after the other."""

    # -- the three

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward. In training it begins a micro-batch, unless one has begun."""
        engine = self.engine
        if not (engine.module.training and torch.is_grad_enabled()):
            with computing(engine.plan.precision, engine.device):
                return engine.module(*args, **kwargs)
        if self._ready:
            raise JobError("a forward between backward() and step()", rule="forward, backward, step: in this order")
        if self._open is None:
            if self.micro_steps % self.gradient_accumulation_steps() == 0:
                self._begin()
            self._open = ExitStack()
            self._open.enter_context(engine.strategy.accumulate(last=self.is_gradient_accumulation_boundary()))
            self._open.enter_context(multiplying(engine.plan.precision))
        try:
            with engine.phase("forward"), computing(engine.plan.precision, engine.device), self._masks():
                return engine.module(*args, **kwargs)
        except BaseException:
            self._abandon()
            raise

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Backward of the mean loss of this rank's micro-batch; the loss is returned as it came."""
        if self._open is None:
            raise JobError("backward() without a forward", rule="forward, backward, step: in this order")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise JobError(f"the loss is {what}", rule="the loss is one number: the mean over this rank's samples")
        engine = self.engine
        share = engine.strategy.divides / (engine.ranks * self.gradient_accumulation_steps())
        opened, self._open = self._open, None
        with opened, engine.phase("backward"):
            (loss.reshape(()) * (share * self.loss_scale())).backward()
        self._sums[0] += loss.detach().double().reshape(())
        self._ready = True
        return loss

    def step(self) -> None:
        """End a micro-batch; with the last one of a batch, update the parameters and the rates."""
        if not self._ready:
            raise JobError("step() without a backward", rule="forward, backward, step: in this order")
        last = self.is_gradient_accumulation_boundary()
        self._ready = False
        self.micro_steps += 1
        if last:
            self._update()

    def _begin(self) -> None:
        """A batch begins: as in `Engine.step`."""
        self.engine.record.begin(self.engine.position)
        self.engine.moving.keep()
        self._sums.zero_()

    def _update(self) -> None:
        """The batch is complete: agree on its norm, then update or leave it out."""
        engine = self.engine
        with engine.phase("communication"):
            self._sums[1] = engine.strategy.unseen()
            if engine.ranks > 1:
                with engine.record.message("all_reduce", self._sums):
                    dist.all_reduce(self._sums, group=engine.group)
            engine.strategy.gather_gradients()
            total, missed, square = torch.cat([self._sums, engine.update.square()]).tolist()
            if missed:
                engine.strategy.drop_unseen()
        self.mean_loss = total / (engine.ranks * self.gradient_accumulation_steps())
        factor = 1.0 / self.loss_scale()
        engine.grad_norm = factor * math.sqrt(square) if square >= 0 else math.nan
        if engine.guard.finite(self.mean_loss, engine.grad_norm):
            self._row = 0
            engine.apply(self.mean_loss, factor)
        else:
            self._leave_out()
        engine.position += 1
        engine.record.end()

    def _leave_out(self) -> None:
        """The loop has gone on and cannot be run again. In fp16 the scale was too large, and falls, as in DeepSpeed."""
        engine, guards = self.engine, self.engine.guard.guards
        names = [piece.name for piece, g in engine.update.gradients() if not bool(g.isfinite().all())]
        engine.strategy.forget()
        engine.moving.undo()
        self.skipped_steps += 1
        self._row += 1
        if engine.scaler is not None and math.isfinite(self.mean_loss):
            engine.scaler.overflowed()
        elif guards.nonfinite != "skip" or self._row > guards.patience:
            raise GaveUp(
                f"loss {self.mean_loss:.4g}, norm of the gradients {engine.grad_norm:.4g}, at step {engine.steps}",
                where=f"rank {engine.rank}, {names[0]}" if names else "",
                rule="training goes on while both are finite; the weights are those before this step",
                fix="Guards(nonfinite='skip') leaves such steps out, a few in a row",
            )

    def _abandon(self) -> None:
        """A forward has failed: nothing of its batch stays, and the next forward begins one."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.pop_all()  # what they would do on the way out waits for a backward that does not come
        self.engine.strategy.forget()
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()

    @contextmanager
    def _masks(self) -> Iterator[None]:
        """Dropout masks of their own for every rank and micro-batch; the user's random numbers go on undisturbed."""
        engine = self.engine
        devices = [engine.device] if engine.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(mix(engine.job.seed, engine.position, self.micro_steps, engine.rank))
            yield

    # -- what DeepSpeed's users ask an engine

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch that is run now is the last one of its batch."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.engine.plan.micro

    def train_batch_size(self) -> int | None:
        """Samples per step over all ranks, if the config says so."""
        return self.imported.batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of one rank in one micro-batch, if the config says so."""
        return self.imported.micro_size

    def loss_scale(self) -> float:
        """By what the loss is multiplied in the backward; the gradients are divided by it."""
        return self.engine.scaler.scale if self.engine.scaler else 1.0

    def get_global_grad_norm(self) -> float:
        """Of the last step, before clipping."""
        return self.engine.grad_norm

    def get_lr(self) -> list[float]:
        """The rates of the coming step, one per group of parameters."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def global_steps(self) -> int:
        """Optimizer steps applied so far."""
        return self.engine.steps

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self.engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer on what this rank holds."""
        return self.engine.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler, or None."""
        return self.engine.schedule

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.engine.device

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.engine.ranks

    def train(self, mode: bool = True) -> Triple:
        """Into training, or out of it."""
        self.engine.module.train(mode)
        return self

    def eval(self) -> Triple:
        """Out of training."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Nothing: a step forgets its gradients."""

    def module_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole weights and buffers under the model's own names, on every rank, whatever the plan."""
        model = self.engine.model
        found = self.engine.whole_parameters()
        first = {id(p): name for name, p in model.named_parameters()}
        for name, p in model.named_parameters(remove_duplicate=False):
            if first[id(p)] != name:  # tied to another
                found[self.engine.own_name(name)] = found[self.engine.own_name(first[id(p)])]
        for prefix, module in model.named_modules():
            for key, b in module._buffers.items():
                if b is not None and key not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{key}" if prefix else key] = b
        return found
