"""Replication, on torch's DDP: every rank has the whole model and runs its slice of the batch.

Gradients are summed over the ranks in buckets of `bucket` bytes while the backward runs: the bucket of the last layers
is sent while the first layers compute. With several micro-batches only the last one sends. `allreduce` names the
algorithm of the sum (gradient_collectives.py).

`compress` sends fewer bytes, by torch's communication hooks, and the sum is approximate: `fp16` rounds gradients to
half precision; `powersgd` sends two low-rank factors of every matrix, and adds the error to the next step's gradient.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ...plans import Plan
from ...plans.engine_constants import POWERSGD_RANK
from ...torchkit.fake_tensors import has_no_values
from ..state.pieces import Piece
from ..state.recorded_engines import record_ddp
from .gradient_collectives import GradientCollectives, sum_buckets
from .strategy import Strategy

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}
"""Not synchronized: statistics span all ranks, so they are equal. Newer releases of torch renamed the argument."""


DEFAULT_BUCKET = Plan().bucket
"""With torch's own default the first bucket is small, so that sending begins early."""

FIRST_STEP = 2
"""Steps before PowerSGD begins: by then DDP has rebuilt its buckets, and the largest gradients are past."""


class WholeModel(Strategy):
    """One copy of the weights in this process; a subclass decides how it is called."""

    def __init__(self) -> None:
        self._model: nn.Module
        self._parameters: list[nn.Parameter] = []

    def keep(self, model: nn.Module) -> None:
        """Remember the model; `wrap` begins with this."""
        self._model, self._parameters = model, list(model.parameters())

    def pieces(self) -> list[Piece]:
        return [Piece(name, tuple(p.shape), 0, p, replicated=True) for name, p in self._model.named_parameters()]

    def gather_gradients(self) -> None:
        """Nothing to do: after the backward they are complete, in the parameters."""

    def after_update(self) -> None:
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None


class ReplicatedModel(WholeModel):
    """One copy of the model on each rank."""

    def __init__(
        self, group: dist.ProcessGroup, plan: Plan, *, unused: bool, schedules: GradientCollectives | None = None
    ) -> None:
        super().__init__()
        self._ranks, self._plan, self._unused = group, plan, unused
        self._schedules = schedules
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
        if self._schedules is not None:
            sum_buckets(self._ddp, self._schedules, self.record)
            self.gradient_divisor = 1
        elif self.record and self._plan.compress == "none" and record_ddp(self.record, self._ddp, self._ranks):
            self.gradient_divisor = 1
        return self._ddp

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._ddp is None or last else self._ddp.no_sync()


def compress(model: DistributedDataParallel, how: str, group: dist.ProcessGroup) -> None:
    """Compress the gradients of a replicated model."""
    if how == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif how == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=FIRST_STEP,
            min_compression_rate=1.5,
            use_error_feedback=True,
            warm_start=True,
            random_seed=0,
        )
        if next(model.parameters()).device.type == "cpu":
            powerSGD_hook.dist = _BlockingDist()  # type: ignore[assignment]  # the only way into torch's hook
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class _BlockingDist:
    """torch.distributed for PowerSGD on CPUs, with blocking messages.

    A bucket's second message is sent and waited for when its first has arrived. Torch does so inside the thread that
    received the first; CPU groups have one or two such threads, and all of them would wait.
    """

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        work = dist.all_reduce(*args, **kwargs)
        if work is not None:
            work.get_future().wait()
        return work

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)
