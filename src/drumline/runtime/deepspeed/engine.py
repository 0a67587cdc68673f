"""DeepSpeed's training loop: `out = engine(x)`, `engine.backward(loss)`, `engine.step()`.

Every micro-batch goes through all three calls; the optimizer steps with the last micro-batch of a batch. The gradient
is the mean over micro-batches and ranks, each with equal weight, as in DeepSpeed. That equals the mean over samples if
all have the same number of samples; a ragged last batch gives its samples more weight. `engine.step(batch)` of a `Job`
weighs every sample equally, whatever the sizes.
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
from ...datasets.seeding import mix_seed
from ...interop.imported import ImportedConfig
from ..engine import Engine
from ..numerics.precision import compute_precision, float32_arithmetic
from .gradient_watch import GradientWatch


class DeepSpeedEngine:
    """An engine with separate forward, backward and step. `.engine` has the rest: data, checkpoints, evaluation."""

    def __init__(self, engine: Engine, imported: ImportedConfig) -> None:
        self.engine, self.imported = engine, imported
        self.micro_steps = 0
        """Micro-batches so far."""
        self.skipped_steps = 0
        """Steps skipped because of non-finite gradients."""
        self.mean_loss = 0.0
        """Mean loss of the last step, over its micro-batches and all ranks."""
        self._open: ExitStack | None = None
        """Contexts that span the forward and backward of a micro-batch."""
        self._ready = False
        """Whether this micro-batch has its gradients."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
        """Sum of the losses of this batch so far, and the number of parameters its backwards did not reach."""
        self._skipped_in_a_row = 0
        self._watch = GradientWatch()

    # -- forward, backward, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward. In training mode it begins a micro-batch, unless one has begun."""
        engine = self.engine
        if not (engine.module.training and torch.is_grad_enabled()):
            with compute_precision(engine.plan.precision, engine.device):
                return engine.module(*args, **kwargs)
        if self._ready:
            raise JobError("forward between backward() and step()", rule="call forward, backward, step in this order")
        if self._open is None:
            if self.micro_steps % self.gradient_accumulation_steps() == 0:
                self._begin()
            self._open = ExitStack()
            self._open.enter_context(engine.strategy.accumulate(last=self.is_gradient_accumulation_boundary()))
            self._open.enter_context(float32_arithmetic(engine.plan.precision))
        try:
            with (
                engine.phase("forward"),
                compute_precision(engine.plan.precision, engine.device),
                self._own_random_state(),
            ):
                return engine.module(*args, **kwargs)
        except BaseException:
            self._abandon()
            raise

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Backward of the mean loss of this rank's micro-batch; returns the loss unchanged."""
        if self._open is None:
            raise JobError("backward() without a forward", rule="call forward, backward, step in this order")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise JobError(f"the loss is {what}", rule="the loss is a scalar: the mean over this rank's samples")
        engine = self.engine
        share = engine.strategy.gradient_divisor / (engine.ranks * self.gradient_accumulation_steps())
        contexts, self._open = self._open, None
        with contexts, engine.phase("backward"):
            (loss.reshape(()) * (share * self.loss_scale())).backward()
        self._watch.note(engine.model.parameters())
        self._sums[0] += loss.detach().double().reshape(())
        self._ready = True
        return loss

    def step(self) -> None:
        """End a micro-batch; after the last one of a batch, update parameters and learning rates."""
        if not self._ready:
            raise JobError("step() without a backward", rule="call forward, backward, step in this order")
        last = self.is_gradient_accumulation_boundary()
        if reason := self._unfinished_gradients:
            self._watch.check(str(self.engine.plan), reason)
        self._ready = False
        self.micro_steps += 1
        if last:
            self._update()

    @property
    def _unfinished_gradients(self) -> str:
        """Why the gradients after a backward are not the final ones; empty where they are."""
        plan, engine = self.engine.plan, self.engine
        if engine.scaler is not None:
            return f"precision=fp16 has them multiplied by the loss scale, {engine.scaler.scale:g}"
        if plan.zero in (1, 2) and engine.ranks > 1:
            return (
                f"under zero={plan.zero} a rank has its own gradients there, and they are summed over the ranks later"
            )
        if plan.micro > 1 and engine.ranks > 1:
            return "a batch has several micro-batches, and its gradients are complete after the last one"
        return ""

    def _begin(self) -> None:
        """Begin a batch, as in `Engine.step`."""
        self.engine.record.begin(self.engine.position)
        self.engine.buffer_snapshot.save()
        self._sums.zero_()

    def _update(self) -> None:
        """The batch is complete: agree on its gradient norm, then update or skip it."""
        engine = self.engine
        with engine.phase("communication"):
            self._sums[1] = engine.strategy.unreached()
            if engine.ranks > 1:
                with engine.record.message("all_reduce", self._sums):
                    dist.all_reduce(self._sums, group=engine.group)
            engine.strategy.gather_gradients()
            total, unreached, square = torch.cat([self._sums, engine.update.square()]).tolist()
            if unreached:
                engine.strategy.drop_unreached()
        self.mean_loss = total / (engine.ranks * self.gradient_accumulation_steps())
        factor = 1.0 / self.loss_scale()
        engine.grad_norm = factor * math.sqrt(square) if square >= 0 else math.nan
        if engine.guard.is_finite(self.mean_loss, engine.grad_norm):
            self._skipped_in_a_row = 0
            engine.apply(self.mean_loss, factor)
        else:
            self._skip()
        engine.position += 1
        engine.record.end()

    def _skip(self) -> None:
        """Skip a non-finite step: the loop has moved on and cannot rerun it. An fp16 overflow lowers the loss scale."""
        engine, guards = self.engine, self.engine.guard.guards
        names = [piece.name for piece, g in engine.update.gradients() if not bool(g.isfinite().all())]
        engine.strategy.drop_gradients()
        engine.buffer_snapshot.restore()
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if engine.scaler is not None and math.isfinite(self.mean_loss):
            engine.scaler.on_overflow()
        elif guards.nonfinite != "skip" or self._skipped_in_a_row > guards.patience:
            raise GaveUp(
                f"loss {self.mean_loss:.4g}, gradient norm {engine.grad_norm:.4g} at step {engine.steps}",
                where=f"rank {engine.rank}, {names[0]}" if names else "",
                rule="both must be finite; the weights are those before this step",
                fix="Guards(nonfinite='skip') skips such steps, a few in a row",
            )

    def _abandon(self) -> None:
        """Discard the batch of a failed forward; the next forward begins a new one."""
        contexts, self._open = self._open, None
        if contexts is not None:
            contexts.pop_all()  # their exits would wait for a backward that never comes
        self.engine.strategy.drop_gradients()
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Distinct dropout masks per rank and micro-batch; the user's random state is preserved."""
        engine = self.engine
        devices = [engine.device] if engine.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(mix_seed(engine.job.seed, engine.position, self.micro_steps, engine.rank))
            yield

    # -- DeepSpeed's accessors

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its batch."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.engine.plan.micro

    def train_batch_size(self) -> int | None:
        """Samples per step over all ranks, if the config sets it."""
        return self.imported.batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per rank and micro-batch, if the config sets it."""
        return self.imported.micro_size

    def loss_scale(self) -> float:
        """Factor on the loss in the backward; gradients are divided by it."""
        return self.engine.scaler.scale if self.engine.scaler else 1.0

    def get_global_grad_norm(self) -> float:
        """Gradient norm of the last step, before clipping."""
        return self.engine.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rates of the next step, one per parameter group."""
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
        """The optimizer over this rank's shards."""
        return self.engine.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate scheduler, or None."""
        return self.engine.schedule

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.engine.device

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.engine.ranks

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set training mode."""
        self.engine.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set evaluation mode."""
        return self.train(False)

    def zero_grad(self) -> None:
        """No effect: a step clears its gradients."""

    def module_state_dict(self) -> dict[str, torch.Tensor]:
        """Full weights and buffers under the model's own names, on every rank, whatever the plan."""
        model = self.engine.model
        state = self.engine.whole_parameters()
        first = {id(p): name for name, p in model.named_parameters()}
        for name, p in model.named_parameters(remove_duplicate=False):
            if first[id(p)] != name:  # tied to another
                state[self.engine.user_name(name)] = state[self.engine.user_name(first[id(p)])]
        for prefix, module in model.named_modules():
            for key, b in module._buffers.items():
                if b is not None and key not in module._non_persistent_buffers_set:
                    state[f"{prefix}.{key}" if prefix else key] = b
        return state
