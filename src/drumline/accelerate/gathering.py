"""Values of all ranks: tensors in lists, tuples and dicts, gathered or reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import InputError


def gather(value: Any, device: torch.device) -> Any:
    """The tensors of all ranks, one after the other along dim 0, in their structure."""
    if not isinstance(value, torch.Tensor):
        return _mapped(lambda v: gather(v, device), value)
    whole = value.detach().to(device)
    whole = whole.reshape(1) if not whole.dim() else whole.contiguous()
    parts = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, whole)
    return torch.cat(parts)


def reduce(value: Any, device: torch.device, reduction: str, scale: float) -> Any:
    """The sum or mean of tensors over the ranks, times `scale`."""
    if reduction not in ("sum", "mean"):
        raise InputError(f"reduction={reduction!r}", rule="sum or mean")
    if not isinstance(value, torch.Tensor):
        return _mapped(lambda v: reduce(v, device, reduction, scale), value)
    whole = value.detach().to(device).clone()
    dist.all_reduce(whole)
    return whole * (scale / dist.get_world_size() if reduction == "mean" else scale)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([function(v) for v in value])
    raise InputError(f"gather() of {type(value).__name__}", rule="tensors, in lists, tuples and dicts")


def first_samples(value: Any, n: int) -> Any:
    """The first `n` along dim 0 of each tensor, or of a list."""
    if isinstance(value, torch.Tensor):
        return value[:n]
    if isinstance(value, dict):
        return {key: first_samples(v, n) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(first_samples(v, n) for v in value)
    nested = isinstance(value, list) and value and isinstance(value[0], torch.Tensor | dict | tuple)
    return [first_samples(v, n) for v in value] if nested else value[:n]
