"""Replication, on torch's DDP: every rank has the whole model and runs its slice of the batch.

Gradients are summed over the ranks in buckets of `bucket` bytes while the backward runs: the bucket of the last layers
is sent while the first layers compute. With several micro-batches only the last one sends.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...plans import Plan
from ...torchkit.fake_tensors import has_no_values
from .compress import compress
from .whole import WholeModel

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}
"""Not synchronized: statistics span all ranks, so they are equal. Newer releases of torch renamed the argument."""


DEFAULT_BUCKET = Plan().bucket
"""With torch's own default the first bucket is small, so that sending begins early."""


class ReplicatedModel(WholeModel):
    """One copy of the model on each rank."""

    def __init__(self, group: dist.ProcessGroup, plan: Plan, *, unused: bool) -> None:
        super().__init__()
        self._ranks, self._plan, self._unused = group, plan, unused
        self._ddp: DistributedDataParallel | None = None
        self.gradient_divisor = dist.get_world_size(group)

    def wrap(self, model: nn.Module) -> nn.Module:
        self.keep(model)
        if dist.get_world_size(self._ranks) == 1:
            return model
        device = next(model.parameters()).device
        bucket = self._plan.bucket
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=self._ranks,
            bucket_cap_mb=None if bucket == DEFAULT_BUCKET else max(1, bucket // 2**20),
            gradient_as_bucket_view=True,
            find_unused_parameters=self._unused and not self._plan.static,
            static_graph=self._plan.static,
            init_sync=not has_no_values(next(model.parameters())),  # a dry run has no other ranks to compare with
            **_BUFFERS,
        )
        compress(self._ddp, self._plan.compress, self._ranks)
        if self.record and self._plan.compress == "none" and self.record.record_ddp(self._ddp, self._ranks):
            self.gradient_divisor = 1
        return self._ddp

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        if self._ddp is None or last:
            yield
        else:
            with self._ddp.no_sync():
                yield
