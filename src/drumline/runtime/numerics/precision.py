"""The precision of a step. Parameters, gradients and optimizer state stay in the type of the model; `bf16-pure` casts
them to bf16 when the model is built (core/half_weights.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...tracing.fake import dtype_of
from .float32_settings import float32_in
from .recurrent import LstmWithoutOnednn, RecurrentDtype, has_recurrent_layers, onednn_lacks

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16, "fp8": torch.bfloat16}
"""Precisions whose matmuls read half precision, and its type; those of `fp8` are in bf16 where they are not in fp8."""


def compute_precision(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Around forward and loss: autocast to the plan's precision."""
    if precision not in HALVES:
        return nullcontext()
    half = HALVES[precision]
    autocast = torch.autocast(device.type, dtype=half)
    if device.type == "cuda":
        return _both(autocast, RecurrentDtype(half)) if has_recurrent_layers() else autocast
    return _both(autocast, LstmWithoutOnednn(half)) if onednn_lacks(half) else autocast


@contextmanager
def _both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


def float32_arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Around forward and backward: float32 operators of a GPU compute in float32 under `fp32`, in tf32 under `tf32`.

    Under the other precisions what is left in float32 follows the settings of the process.
    """
    if precision not in ("fp32", "tf32"):
        return nullcontext()
    return float32_in("tf32" if precision == "tf32" else "ieee", device)


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Move a batch; with a dtype, cast its floating-point tensors too (verification runs in float64)."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=dtype_of(value, dtype), non_blocking=True)
    if isinstance(value, dict):
        return {k: to_device(v, device, dtype) for k, v in value.items()}
    if isinstance(value, tuple | list):
        moved = [to_device(v, device, dtype) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value
