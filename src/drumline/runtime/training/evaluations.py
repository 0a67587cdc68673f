"""Evaluations during a training, and what follows: schedules that wait for a metric, callbacks, early stops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...core.errors import JobError
from ..core.batches_in_flight import CompletedStep
from ..state.optimizer import waits_for_metric

if TYPE_CHECKING:
    from ..engine import Engine


class Evaluations:
    """Evaluates every n steps, and calls the callbacks after every step. All ranks use it at the same steps."""

    def __init__(self, engine: Engine, emit: Callable[[dict[str, Any]], None]) -> None:
        self._engine, self._emit, self._every = engine, emit, engine.job.evaluate_every
        self._evaluated = engine.steps
        """Steps when an evaluation was last considered."""
        self.last: tuple[int, dict[str, float]] | None = None
        """The newest evaluation, and the steps that had been made."""
        self.stopped = False
        """Whether a callback has ended the training."""
        self._wants_stop = False
        if waits_for_metric(engine.schedule) and not self._every:
            raise JobError(
                "ReduceLROnPlateau without evaluations",
                rule="it waits for a metric of an evaluation, and none is made before the end",
                fix="evaluate_every=n in the job; monitor='NAME' chooses a metric of its evaluate(), or 'loss'",
            )

    def completed(self, steps: Iterable[CompletedStep]) -> None:
        """Tell the callbacks of steps that were completed."""
        for done in steps:
            self._wants_stop |= self._engine.callbacks.after_step(self._engine, done.step, done.loss)

    @property
    def due(self) -> bool:
        """Whether an evaluation is due after this step: it completes the steps in flight."""
        steps = self._engine.steps + self._engine.steps_in_flight
        return bool(self._every) and steps // self._every > self._evaluated // self._every

    def after_step(self) -> bool:
        """Evaluate if it is due. Whether the training is to stop here. All ranks call it where they meet."""
        engine, due = self._engine, self.due
        if due:
            self._evaluated = engine.steps
            metrics = engine.evaluate()
            self.last = engine.steps, metrics
            if engine.rank == 0:
                shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
                self._emit({"message": f"evaluation after {engine.steps} steps: {shown}", "evaluation": metrics})
            engine.update.advance_on(metrics, engine.job.monitor)
            self._wants_stop |= engine.callbacks.after_evaluation(engine, engine.steps, metrics)
        if not engine.callbacks or (engine.in_flight is not None and not due):
            return False
        self.stopped = self._agreed()
        if self.stopped and engine.rank == 0:
            self._emit({"message": f"a callback ended the training after {engine.steps} steps"})
        return self.stopped

    def at_end(self, *, wanted: bool) -> dict[str, float]:
        """The evaluation at the end of the training, if it is wanted."""
        if not wanted:
            return {}
        if self.last is not None and self.last[0] == self._engine.steps:
            return self.last[1]
        return self._engine.evaluate()

    def _agreed(self) -> bool:
        """Whether any rank wants to stop: all stop after the same step."""
        engine = self._engine
        if engine.ranks == 1:
            return self._wants_stop
        flag = torch.tensor([int(self._wants_stop)], dtype=torch.int32, device=engine.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=engine.group)
        return bool(flag.item())
