"""Constant tensors, made once: to make one takes a host as long as any other launch."""

from __future__ import annotations

from functools import lru_cache

import torch


def constant(
    value: float, like: torch.Tensor, *, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """A tensor full of `value`, on the device of `like`; nothing may write to it.

    Tensors without values, and those that a CUDA graph makes, belong to their context and are not kept.
    """
    if type(like) is not torch.Tensor or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.full(shape, value, dtype=dtype, device=like.device)
    return _kept(value, shape, dtype, like.device)


@lru_cache(maxsize=64)
def _kept(value: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)
