"""Marks that torch's optimizers and learning-rate schedulers leave on each other.

Written for torch 2.13. Missing public API: an optimizer is fused by an argument of its constructor only, and a
scheduler recognises a step by a mark on the optimizer.
"""

from __future__ import annotations

import torch

__all__ = ["can_skip_on_device", "mark_fused", "mark_stepped"]


def mark_fused(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer whose groups now say `fused`, as its own constructor does."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # private
    if isinstance(optimizer, torch.optim.SGD):
        optimizer._need_device_dtype_check_for_fused = True


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel takes a scale and a flag that makes it skip the step (torch's loss scaling)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the optimizer has stepped: they warn if they are stepped before it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # private
