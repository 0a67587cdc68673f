"""The engine, the optimizer and the scheduler as Accelerate's `prepare` returns them."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import JobError
from ..runtime.deepspeed.engine import DeepSpeedEngine
from ..runtime.state.prebuilt import PrebuiltScheduler
from .loaders import PreparedLoader


class PreparedModel(DeepSpeedEngine):
    """The model in the engine. A batch of micro-batches also ends with the loader, as in Accelerate."""

    loaders: tuple[PreparedLoader, ...] = ()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its batch, or of its loader."""
        return super().is_gradient_accumulation_boundary() or any(loader.at_end for loader in self.loaders)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has run that no step has used."""
        return self._ready

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the coming update to a gradient norm; returns the norm before."""
        if not self._ready:
            raise JobError("clip_grad_norm_() without a backward", rule="between backward() and optimizer.step()")
        if not self._reduced:
            self._reduce()
        self.engine.update.clip = max_norm
        return torch.tensor(self.engine.grad_norm, device=self.device)

    def _update(self) -> None:
        try:
            super()._update()
        finally:
            self.engine.update.clip = None


class PreparedOptimizer:
    """The engine's optimizer. `step` steps with the last micro-batch of a batch; `zero_grad` has nothing to do."""

    def __init__(self, model: PreparedModel) -> None:
        self._model = model
        self.step_was_skipped = False
        """Whether the last step had gradients that were not finite."""

    def __getattr__(self, name: str) -> Any:
        if name == "_model":
            raise AttributeError(name)
        return getattr(self._model.optimizer, name)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over this rank's shards."""
        return self._model.optimizer

    def step(self, closure: Any = None) -> None:
        """End a micro-batch, and update after the last one of a batch."""
        if closure is not None:
            raise JobError("optimizer.step(closure)", rule="gradients are exchanged once", fix="backward, then step()")
        before = self._model.skipped_steps
        self._model.step()
        self.step_was_skipped = self._model.skipped_steps > before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A step has dropped its gradients. Between a backward and its step, refused."""
        if self._model.has_gradients:
            raise JobError(
                "optimizer.zero_grad() between backward() and optimizer.step()",
                rule="gradients of a micro-batch that were exchanged cannot be dropped",
                fix="backward, step, zero_grad in this order",
            )


class PreparedScheduler:
    """A scheduler of the engine's optimizer. It steps with the optimizer, once for every rank, as in Accelerate.

    (In Accelerate a schedule is written for one process, which would see each batch by itself.)
    """

    def __init__(self, scheduler: Any, model: PreparedModel, optimizer: PreparedOptimizer, times: int) -> None:
        self.scheduler = PrebuiltScheduler(scheduler)(model.optimizer)
        self._model, self._optimizer, self._times = model, optimizer, times

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **options: Any) -> None:
        """Step, unless this micro-batch did not update the weights."""
        if self._model.micro_of_batch or self._optimizer.step_was_skipped:
            return
        for _ in range(self._times):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **options)
