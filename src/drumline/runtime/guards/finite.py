"""Whether a tensor's numbers are finite."""

from __future__ import annotations

import math

import torch


@torch.no_grad()
def finite(tensor: torch.Tensor) -> bool:
    """Whether all of its numbers are; whole numbers are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    return bool(torch.isfinite(tensor.detach()).all())


@torch.no_grad()
def spoiled(tensor: torch.Tensor) -> bool:
    """Whether it holds more than masks: not-a-number or +inf."""
    if not tensor.is_floating_point():
        return not finite(tensor)
    return bool((torch.isnan(tensor) | (tensor == math.inf)).any())
