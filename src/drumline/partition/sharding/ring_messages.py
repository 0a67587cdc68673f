"""Messages of ring attention: which rank needs which block, how far each block travels, and its buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import gloo_fallbacks
from .redistribution import Axis

Bounds = tuple[int, ...]
"""Rank r has the positions bounds[r] to bounds[r+1]."""


@dataclass(frozen=True, slots=True)
class RingSchedule:
    """Which rank needs which block, and how far each block travels."""

    rank: int
    bounds: Bounds
    q_bounds: Bounds
    causal: bool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.bounds) - 1

    @property
    def rows(self) -> tuple[int, int]:
        """Numbers of this rank's queries and keys."""
        return self.q_bounds[self.rank + 1] - self.q_bounds[self.rank], self.columns(self.rank)

    def columns(self, block: int) -> int:
        """Number of keys of a block."""
        return self.bounds[block + 1] - self.bounds[block]

    def block(self, step: int) -> int:
        """The block whose keys are on this rank in a step."""
        return (self.rank - step) % self.size

    def needs(self, rank: int, block: int) -> bool:
        """Whether any query of the rank attends to any key of the block."""
        start, stop = self.q_bounds[rank : rank + 2]
        return start < stop and self.columns(block) > 0 and (not self.causal or self.bounds[block] < stop)

    def reach(self, block: int) -> int:
        """Steps that the block travels: to the last rank of the ring that needs it."""
        return max((s for s in range(self.size) if self.needs((block + s) % self.size, block)), default=0)

    def arrives(self, step: int) -> bool:
        """Whether the block of a step reaches this rank."""
        return step < self.size and self.reach(self.block(step)) >= step

    def offset(self, block: int) -> int | None:
        """Row i of this rank attends to columns up to i + offset of the block; None: to all."""
        offset = self.q_bounds[self.rank] - self.bounds[block]
        return offset if self.causal and offset < self.columns(block) - 1 else None


class RingMessages:
    """Messages that start together. Each pair of ranks lists its messages in the same order: there are no tags."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._operations: list[dist.P2POp] = []
        self._works: list[Any] = []

    def send(self, buffer: Tensor, to: int) -> None:
        self._operations.append(dist.P2POp(dist.isend, buffer, group=self._axis.group, group_peer=to))

    def receive(self, buffer: Tensor, source: int) -> Tensor:
        """The buffer, filled after `wait`."""
        self._operations.append(dist.P2POp(dist.irecv, buffer, group=self._axis.group, group_peer=source))
        return buffer

    def start(self) -> None:
        self._works = gloo_fallbacks.batch_isend_irecv(self._operations)

    def wait(self) -> None:
        if not self._works:
            return
        sent = sum(o.tensor.nbytes for o in self._operations if o.op is dist.isend)
        # Only the waiting is recorded: transfers hidden behind work cost nothing.
        with self._axis.observe("ring", torch.empty(sent, dtype=torch.uint8, device="meta")):
            for work in self._works:
                work.wait()


class KeyValueBuffer:
    """Keys and values of a block, or their gradients, in one flat buffer and so in one message."""

    def __init__(self, k: Tensor, v: Tensor, ring: RingSchedule, dtype: torch.dtype) -> None:
        self._like, self._shapes, self._ring, self._dtype = k, (k.shape, v.shape), ring, dtype

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.flatten(), v.flatten()]).to(self._dtype)

    def empty(self, block: int) -> Tensor:
        return self._like.new_empty(sum(s.numel() for s in self._shapes_of(block)), dtype=self._dtype)

    def unpack(self, buffer: Tensor, block: int) -> tuple[Tensor, Tensor]:
        k, v = self._shapes_of(block)
        return buffer[: k.numel()].view(k), buffer[k.numel() :].view(v)

    def _shapes_of(self, block: int) -> tuple[torch.Size, torch.Size]:
        k, v = (torch.Size([*s[:-2], self._ring.columns(block), s[-1]]) for s in self._shapes)
        return k, v
