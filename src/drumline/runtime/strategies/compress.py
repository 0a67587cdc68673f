"""Compressed gradients, by torch's communication hooks: fewer bytes are sent, and the sum is approximate.

`fp16` rounds gradients to half precision. `powersgd` sends two low-rank factors of every matrix, and adds the error to
the next step's gradient.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ...plans.engine_constants import POWERSGD_RANK

FIRST_STEP = 2
"""Steps before PowerSGD begins: by then DDP has rebuilt its buckets, and the largest gradients are past."""


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
