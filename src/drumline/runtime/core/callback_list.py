"""The callbacks of a job for one run on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.callbacks import Callback
from ...core.errors import JobError
from ...core.job import Job, call_user_code


class CallbackList:
    """The callbacks of a job, for one run. Errors in them name the line."""

    def __init__(self, job: Job) -> None:
        made = call_user_code(job.callbacks, "the job's callbacks()") if job.callbacks is not None else ()
        if not isinstance(made, list | tuple) or not all(isinstance(c, Callback) for c in made):
            raise JobError("the job's callbacks() gave something else", rule="it returns a list of drumline.Callback")
        self._callbacks: tuple[Callback, ...] = tuple(made)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def after_step(self, engine: Any, step: int, loss: float) -> bool:
        """Call all; whether one wants to stop."""
        answers = [self._run(c.after_step, engine, step, loss) for c in self._callbacks]
        return any(answers)

    def after_evaluation(self, engine: Any, step: int, metrics: Mapping[str, float]) -> bool:
        """Call all; whether one wants to stop."""
        answers = [self._run(c.after_evaluation, engine, step, dict(metrics)) for c in self._callbacks]
        return any(answers)

    def _run(self, method: Any, *arguments: Any) -> bool:
        return bool(call_user_code(method, f"the callback {method.__qualname__}", *arguments))

    def state_dict(self) -> dict[str, Any]:
        """The states, by place and class."""
        return {f"{i} {type(c).__name__}": c.state_dict() for i, c in enumerate(self._callbacks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give back the states to the same callbacks; others start fresh."""
        for i, c in enumerate(self._callbacks):
            saved = state.get(f"{i} {type(c).__name__}")
            if saved is not None:
                c.load_state_dict(saved)
