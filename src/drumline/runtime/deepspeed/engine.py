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

from ...comm.rank_status import BETWEEN, rank_status
from ...core.errors import GaveUp, JobError
from ...datasets.seeding import mix_seed
from ...interop.imported import ImportedConfig
from ..engine import Engine
from ..numerics.precision import compute_precision, float32_arithmetic
from .accessors import EngineAccessors, refuse_options
from .gradient_watch import GradientWatch


class DeepSpeedEngine(EngineAccessors):
    """An engine with separate forward, backward and step. `.engine` has the rest: data, evaluation.

    Attributes that it does not have are those of the model, as in DeepSpeed: `engine.parameters()`.
    """

    def __init__(self, engine: Engine, imported: ImportedConfig) -> None:
        self.engine, self.imported = engine, imported
        self.accumulation = engine.plan.micro
        """Micro-batches per step."""
        self.micro_of_batch = 0
        """Micro-batches of the current batch that are complete."""
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
        self._reduced = False
        """Whether the ranks agree on the gradients of this batch."""
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
            if not self.micro_of_batch:
                self._begin()
            self._open = ExitStack()
            self._open.enter_context(engine.strategy.accumulate(last=self.is_gradient_accumulation_boundary()))
            self._open.enter_context(float32_arithmetic(engine.plan.precision, engine.device))
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

    forward = __call__

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **unsupported: Any
    ) -> torch.Tensor:
        """Backward of the mean loss of this rank's micro-batch; returns the loss unchanged.

        Gradients are divided by the number of micro-batches, unless `scale_wrt_gas` is off: then they are summed.
        """
        refuse_options("backward", unsupported)
        if self._open is None:
            raise JobError("backward() without a forward", rule="call forward, backward, step in this order")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise JobError(f"the loss is {what}", rule="the loss is a scalar: the mean over this rank's samples")
        engine = self.engine
        micros = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        share = engine.strategy.gradient_divisor / (engine.ranks * micros)
        contexts, self._open = self._open, None
        with contexts, engine.phase("backward"):
            (loss.reshape(()) * (share * self.loss_scale())).backward(retain_graph=retain_graph)
        if engine.strategy.keeps_gradients:
            self._watch.note(engine.model.parameters())
        else:
            self._watch.note_sent(engine.model.parameters(), str(engine.plan), self._unfinished_gradients)
        self._sums[0] += loss.detach().double().reshape(())
        self._ready = True
        return loss

    def step(self, **unsupported: Any) -> None:
        """End a micro-batch; after the last one of a batch, update parameters and learning rates."""
        refuse_options("step", unsupported)
        if not self._ready:
            raise JobError("step() without a backward", rule="call forward, backward, step in this order")
        last = self.is_gradient_accumulation_boundary()
        if reason := self._unfinished_gradients:
            self._watch.check(str(self.engine.plan), reason)
        self._ready = False
        self.micro_steps += 1
        self.micro_of_batch += 1
        if last:
            self.micro_of_batch = 0
            self._update()

    @property
    def _unfinished_gradients(self) -> str:
        """Why the gradients after a backward are not the final ones; empty where they are."""
        plan, engine = self.engine.plan, self.engine
        if not engine.strategy.keeps_gradients:
            return f"under zero={plan.zero} a gradient is sent to the rank that updates it as soon as it is computed"
        if engine.scaler is not None:
            return f"precision=fp16 has them multiplied by the loss scale, {engine.scaler.scale:g}"
        if plan.zero == 1 and engine.ranks > 1:
            return "under zero=1 a rank has its own gradients there, and they are summed over the ranks later"
        if plan.micro > 1 and engine.ranks > 1:
            return "a batch has several micro-batches, and its gradients are complete after the last one"
        return ""

    def _begin(self) -> None:
        """Begin a batch, as in `Engine.step`."""
        rank_status().step(self.engine.position)
        self.engine.record.begin(self.engine.position)
        self.engine.buffer_snapshot.save()
        self._sums.zero_()

    def _reduce(self) -> None:
        """The batch is complete: agree on its mean loss and its gradient norm."""
        engine = self.engine
        with engine.phase("communication"):
            self._sums[1] = engine.strategy.unreached()
            if engine.ranks > 1:
                with engine.record.message("all_reduce", self._sums):
                    dist.all_reduce(self._sums, group=engine.group)
            engine.strategy.gather_gradients()
            total, unreached, square = torch.cat([self._sums, engine.update.square().reshape(1)]).tolist()
            if unreached:
                engine.strategy.drop_unreached()
        self.mean_loss = total / (engine.ranks * self.gradient_accumulation_steps())
        engine.grad_norm = math.sqrt(square) / self.loss_scale() if square >= 0 else math.nan
        self._reduced = True

    def _update(self) -> None:
        """Update the weights with the gradients of the batch, or skip it."""
        engine = self.engine
        if not self._reduced:
            self._reduce()
        self._reduced = False
        if engine.guard.is_finite(self.mean_loss, engine.grad_norm):
            self._skipped_in_a_row = 0
            engine.apply(self.mean_loss, 1.0 / self.loss_scale())
        else:
            self._skip()
        engine.position += 1
        engine.record.end()
        rank_status().place(BETWEEN)

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
        self.micro_steps -= self.micro_of_batch
        self.micro_of_batch = 0

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Distinct dropout masks per rank and micro-batch; the user's random state is preserved."""
        engine = self.engine
        devices = [engine.device] if engine.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(mix_seed(engine.job.seed, engine.position, self.micro_steps, engine.rank))
            yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its batch."""
        return self.micro_of_batch + 1 == self.gradient_accumulation_steps()
