"""The type that a step computes in. Parameters, gradients and optimizer state stay in the type of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Around forward and loss: products in the plan's precision."""
    if precision == "bf16":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
    else:
        yield


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Move a batch; with a dtype, its floating-point tensors get it too (verification runs in float64)."""
    if isinstance(value, torch.Tensor):
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.to(device=device, dtype=wanted, non_blocking=True)
    if isinstance(value, dict):
        return {k: to_device(v, device, dtype) for k, v in value.items()}
    if isinstance(value, tuple | list):
        moved = [to_device(v, device, dtype) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value
