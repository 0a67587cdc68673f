"""Copies what is to be saved, so that training can go on while it is written.

The copies lie in one block of host memory that is used again by the next save: touching fresh memory costs more than
the copy itself. On a GPU the block is pinned and the copies are one stream of transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy
import torch

from .view import Held

_ALIGN = 64


def _copy(tensor: torch.Tensor, room: torch.Tensor) -> None:
    """The bytes of a tensor. On the host by one thread: it saturates the memory, and waits for no other."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        numpy.copyto(room.numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
    else:
        room.view(tensor.dtype).copy_(tensor.reshape(-1), non_blocking=tensor.is_cuda)


class Block:
    """Host memory for one snapshot at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._memory.numel()

    @torch.no_grad()
    def copy(self, held: Sequence[Held]) -> list[Held]:
        """The same runs, in memory that nobody else writes to until the next call."""
        sizes = [h.tensor.numel() * h.tensor.element_size() for h in held]
        places = []
        total = 0
        for size in sizes:
            places.append(total)
            total += -(-size // _ALIGN) * _ALIGN
        on_gpu = any(h.tensor.is_cuda for h in held)
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first the old block goes
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copied = []
        for h, place, size in zip(held, places, sizes, strict=True):
            room = self._memory[place : place + size]
            _copy(h.tensor.detach(), room)
            copied.append(replace(h, tensor=room.view(h.tensor.dtype)))
        if on_gpu:
            torch.cuda.synchronize()
        return copied
