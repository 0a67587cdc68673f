"""Notices gradients that a loop changes between backward() and step(), where they are not the final ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...core.errors import JobError
from ...torchkit.dispatch_modes import without_function_modes
from ...torchkit.pytree import tree_leaves


class GradientWatch:
    """Remembers the gradients that a backward left, by tensor and version."""

    def __init__(self) -> None:
        self._seen: list[tuple[torch.nn.Parameter, torch.Tensor | None, int]] = []

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The backward is over."""
        self._seen = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]

    def note_sent(self, parameters: Iterable[torch.nn.Parameter], plan: str, why: str) -> None:
        """The backward is over and has sent its gradients away: stand-ins refuse their use until `check`."""
        own = list(parameters)
        for p in own:
            if p.requires_grad and p.grad is None:
                p.grad = SentGradient(p, changed_gradients(plan, why))
        self.note(own)

    def check(self, plan: str, why: str) -> None:
        """Refuse changes since: they would be summed over ranks, or scaled, afterwards. Removes the stand-ins."""
        for p, gradient, version in self._seen:
            same = p.grad is gradient and (gradient is None or gradient._version == version)
            if not same:
                raise changed_gradients(plan, why)
            if isinstance(gradient, SentGradient):
                p.grad = None
        self._seen = []


def changed_gradients(plan: str, why: str) -> JobError:
    """The error of a loop that reads or changes gradients which are not the final ones."""
    return JobError(
        "gradients were used or changed between backward() and step(): clip_grad_norm_, or another change in place",
        where=f"plan {plan}",
        rule=f"{why}, so a norm taken there is not that of the step",
        fix="gradient_clipping in the config (Job.clip): step() clips by the norm over all ranks; "
        "get_global_grad_norm() is that norm",
    )


class SentGradient(torch.Tensor):
    """Takes the place of a gradient that its rank no longer has; takes no memory, and refuses every operation."""

    _error: JobError

    @staticmethod
    def __new__(cls, p: torch.nn.Parameter, error: JobError) -> SentGradient:
        """Stand in for the gradient of `p`: its shape, and not a number wherever it could still be read."""
        stand_in = p.detach().new_full((), torch.nan).expand(p.shape).as_subclass(cls)
        stand_in._error = error
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Shape, type and device can be read; whatever computes raises an error."""
        if func.__name__ == "__get__" and func not in _READS_NUMBERS:
            with without_function_modes():
                return func(*args, **(kwargs or {}))
        raise next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))._error


_READS_NUMBERS = {getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
