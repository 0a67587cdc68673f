"""`deepspeed.comm`: torch.distributed's functions on the group that `init_distributed` joins."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..comm.environment import rank_info
from ..runtime.deepspeed.arguments import init_distributed as init_distributed


def get_local_rank() -> int:
    """This rank's number on its host."""
    return rank_info().local_rank


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
