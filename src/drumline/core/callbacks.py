"""Callbacks of a training: called on every rank after each step and each evaluation, and able to stop it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import JobError, nearest


class Callback:
    """Override what you need. A method that returns True stops the training, on all ranks, after this step.

    What `state_dict` returns (numbers, strings, lists and dicts) is saved with checkpoints.
    """

    def after_step(self, engine: Any, step: int, loss: float) -> bool | None:
        """After a step, which has the number and the loss of its log line."""

    def after_evaluation(self, engine: Any, step: int, metrics: Mapping[str, float]) -> bool | None:
        """After an evaluation, following this step."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


class EarlyStop(Callback):
    """Stops when a metric has not improved in `patience` evaluations in a row."""

    def __init__(self, metric: str = "loss", *, patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise JobError(f"EarlyStop(mode={mode!r})", rule="'min' or 'max'")
        if patience < 1:
            raise JobError(f"EarlyStop(patience={patience})", rule="at least one evaluation")
        self.metric, self.patience, self.min_delta, self.sign = metric, patience, min_delta, 1 if mode == "min" else -1
        self.best, self.bad = math.inf, 0

    def after_evaluation(self, engine: Any, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare the metric with the best so far. A value that is not a number is no improvement."""
        if self.metric not in metrics:
            raise JobError(
                f"EarlyStop waits for {self.metric!r}, and the evaluation has {', '.join(metrics)}",
                fix=nearest(self.metric, metrics),
            )
        value = self.sign * metrics[self.metric]
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """The best value and the evaluations since."""
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting."""
        self.best, self.bad = state["best"], state["bad"]
