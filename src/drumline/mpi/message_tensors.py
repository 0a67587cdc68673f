"""Messages as tensors, for collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .buffers import MessageBuffer


def _typed(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    if len(memory) == 0:
        return torch.empty(0, dtype=dtype)
    if memory.readonly:
        memory = memoryview(bytearray(memory))
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def element_dtype(region: MessageBuffer) -> torch.dtype:
    """The common type of all elements, or bytes: compared by the ranks before data moves."""
    uniform_scalar = region.layout.uniform_scalar
    return uniform_scalar.torch if uniform_scalar is not None and uniform_scalar.torch is not None else torch.uint8


def input_tensor(region: MessageBuffer) -> torch.Tensor:
    """The data to send, as a tensor."""
    return _typed(region.data(), element_dtype(region))


def output_tensor(region: MessageBuffer) -> tuple[torch.Tensor, Callable[[], None]]:
    """The tensor to receive into, and the function that unpacks it."""
    receive_memory = region.receive_memory()
    return _typed(receive_memory, element_dtype(region)), lambda: region.unpack_received(
        receive_memory, len(receive_memory)
    )


def raw_tensor(region: MessageBuffer, dtype: torch.dtype) -> torch.Tensor:
    """The memory including gaps, as a tensor, for operators."""
    return _typed(region.raw(), dtype)
