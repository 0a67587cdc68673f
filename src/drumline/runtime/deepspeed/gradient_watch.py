"""Notices gradients that a loop changes between backward() and step(), where they are not the final ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...core.errors import JobError


class GradientWatch:
    """Remembers the gradients that a backward left, by tensor and version."""

    def __init__(self) -> None:
        self._seen: list[tuple[torch.nn.Parameter, torch.Tensor | None, int]] = []

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The backward is over."""
        self._seen = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]

    def check(self, plan: str, why: str) -> None:
        """Refuse changes since: they would be summed over ranks, or scaled, afterwards."""
        for p, gradient, version in self._seen:
            same = p.grad is gradient and (gradient is None or gradient._version == version)
            if not same:
                raise JobError(
                    "gradients were changed between backward() and step(): clip_grad_norm_, or another change in place",
                    where=f"plan {plan}",
                    rule=f"{why}, so a norm taken there is not that of the step",
                    fix="gradient_clipping in the config (Job.clip): step() clips by the norm over all ranks; "
                    "get_global_grad_norm() is that norm",
                )
        self._seen = []
