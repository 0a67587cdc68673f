"""Compressed gradients, as torch's communication hooks: less travels, and what arrives is no longer exact.

`fp16` rounds what is sent to half precision. `powersgd` sends two thin factors of every matrix instead of the matrix,
and adds what they missed to the next step's gradient.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ...plans.engine_constants import POWERSGD_RANK

START = 2
"""Steps before PowerSGD begins: the buckets are settled then, and the first gradients are the largest."""


def compress(model: DistributedDataParallel, how: str, group: dist.ProcessGroup) -> None:
    """Let a replicated model send its gradients compressed."""
    if how == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif how == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=START,
            min_compression_rate=1.5,
            use_error_feedback=True,
            warm_start=True,
            random_seed=0,
        )
        if next(model.parameters()).device.type == "cpu":
            powerSGD_hook.dist = _Waiting()  # type: ignore[assignment]  # the one way into torch's own
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class _Waiting:
    """torch.distributed for PowerSGD on CPUs: a message is waited for where it is sent.

    A bucket's second message is sent and waited for when its first has come. Left to torch, that is inside the thread
    that carried the first one; groups on CPUs have one or two of those, and soon all of them wait.
    """

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        work = dist.all_reduce(*args, **kwargs)
        if work is not None:
            work.get_future().wait()
        return work

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)
