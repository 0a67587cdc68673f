"""Buffers as tensors, for collectives: the same memory where it has no gaps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .buffers import Spot


def _typed(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    if len(memory) == 0:
        return torch.empty(0, dtype=dtype)
    if memory.readonly:
        memory = memoryview(bytearray(memory))
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def kind_of(spot: Spot) -> torch.dtype:
    """The one type of all elements, or bytes: what ranks compare before data moves."""
    alike = spot.layout.alike
    return alike.torch if alike is not None and alike.torch is not None else torch.uint8


def given(spot: Spot) -> torch.Tensor:
    """What a rank gives."""
    return _typed(spot.data(), kind_of(spot))


def taken(spot: Spot) -> tuple[torch.Tensor, Callable[[], None]]:
    """What a rank gets, and what to do when it is there."""
    landing = spot.landing()
    return _typed(landing, kind_of(spot)), lambda: spot.land(landing, len(landing))


def raw(spot: Spot, dtype: torch.dtype) -> torch.Tensor:
    """The memory as it is, gaps and all, for operators."""
    return _typed(spot.raw(), dtype)
