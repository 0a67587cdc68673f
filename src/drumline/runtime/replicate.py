"""Replication, on torch's DDP: every rank holds the whole model and runs its slice of the batch.

Gradients are summed over the ranks in buckets of `bucket` bytes while the backward still runs: the bucket of the last
layers travels while the first layers compute. With several micro-batches only the last one sends.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..plan import Plan
from .strategy import Strategy

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}
"""Statistics are equal already, because they span all ranks. Newer releases of torch have a new name for it."""


DEFAULT_BUCKET = Plan().bucket
"""With torch's own default the first bucket is small, so that sending begins early."""


class Replicate(Strategy):
    """One copy a rank."""

    def __init__(self, group: dist.ProcessGroup, *, bucket: int, unused: bool) -> None:
        self._group, self._bucket, self._unused = group, bucket, unused
        self._ddp: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        if dist.get_world_size(self._group) == 1:
            return model
        device = next(model.parameters()).device
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=self._group,
            bucket_cap_mb=None if self._bucket == DEFAULT_BUCKET else max(1, self._bucket // 2**20),
            gradient_as_bucket_view=True,
            find_unused_parameters=self._unused,
            **_BUFFERS,
        )
        return self._ddp

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        if self._ddp is None or last:
            yield
        else:
            with self._ddp.no_sync():
                yield

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def add_up(self, value: torch.Tensor) -> torch.Tensor:
        return value  # every rank holds all of it

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor
