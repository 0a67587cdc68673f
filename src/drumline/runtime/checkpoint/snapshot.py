"""Divides and copies what a save writes, so that training can continue while it is written.

The copies are in one block of host memory that the next save reuses: touching fresh memory costs more than the copy
itself. On a GPU the block is pinned and the copies are one sequence of asynchronous transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy
import torch

from .contents import ReplicaIndex, TensorRun

_ALIGN = 64


def share(runs: Sequence[TensorRun], replica: ReplicaIndex) -> list[TensorRun]:
    """This rank's share of what `replica.count` ranks hold equally: every element once, about equal bytes per rank."""
    total = sum(run.tensor.nbytes for run in runs)
    low, high = (total * i // replica.count for i in (replica.index, replica.index + 1))
    mine = []
    offset = 0
    for run in runs:
        first, last = (_element_at(bound - offset, run.tensor) for bound in (low, high))
        if first < last:
            whole = first == 0 and last == run.tensor.numel()
            part = run.tensor if whole else run.tensor.detach().reshape(-1)[first:last]
            mine.append(replace(run, start=run.start + first, tensor=part))
        offset += run.tensor.nbytes
    return mine


def _element_at(offset: int, tensor: torch.Tensor) -> int:
    """The first element at or after a byte offset: the same for the rank that ends there and the one that begins."""
    return min(tensor.numel(), max(0, -(-offset // tensor.element_size())))


class SnapshotMemory:
    """Host memory for one snapshot at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Bytes allocated."""
        return self._memory.numel()

    @torch.no_grad()
    def copy(self, runs: Sequence[TensorRun]) -> list[TensorRun]:
        """Copies of the runs, valid until the next call."""
        sizes = [run.tensor.nbytes for run in runs]
        offsets = []
        total = 0
        for size in sizes:
            offsets.append(total)
            total += -(-size // _ALIGN) * _ALIGN
        on_gpu = any(run.tensor.is_cuda for run in runs)
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old block first
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for run, offset, size in zip(runs, offsets, sizes, strict=True):
            target = self._memory[offset : offset + size]
            _copy(run.tensor.detach(), target)
            copies.append(replace(run, tensor=target.view(run.tensor.dtype)))
        if on_gpu:
            torch.cuda.synchronize()
        return copies


def _copy(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor's bytes. On the host with one thread: it saturates the memory, and waits for no other."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        numpy.copyto(target.numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
    else:
        target.view(tensor.dtype).copy_(tensor.reshape(-1), non_blocking=tensor.is_cuda)
