"""What processes of plans with a coordinator run in tests; functions travel by name."""

from __future__ import annotations

from typing import Any

import small_jobs
import torch

from drumline.plans import Plan
from drumline.runtime.asynchronous.verification import verify_coordinated
from drumline.runtime.verification.verify import Verification

Cell = tuple[str, str]
"""A job and a plan."""


def verify_cells(emit: Any, cells: list[Cell], steps: int) -> list[Verification | None]:
    """Verify plans one after the other, on the same processes."""
    return [
        verify_coordinated(small_jobs.make(job), Plan.parse(plan), steps=steps, first_round=2 * i)
        for i, (job, plan) in enumerate(cells)
    ]


def verify_broken(emit: Any, plan: str, steps: int) -> Verification | None:
    """Verify a plan whose servers make a small mistake: they add a little to every element."""
    from drumline.runtime.asynchronous import server

    server._weighted_sum = _plain_sum
    return verify_coordinated(small_jobs.make("masked"), Plan.parse(plan), steps=steps)


def _plain_sum(gradients: list[list[torch.Tensor]], weights: Any) -> list[torch.Tensor]:
    return [torch.stack(list(column)).sum(0) + 1e-3 for column in zip(*gradients, strict=True)]
