"""The torch.distributed backend `shm`: `init_process_group("shm")` after `import drumline.comm`."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from ...core.errors import DrumlineError
from ..torchgroup.errors import for_torch
from ..torchgroup.group import EngineGroup
from .engine import ShmEngine
from .segment import NoSharedMemory


def register() -> None:
    """Make the name known to torch."""
    if "SHM" not in dist.Backend._plugins:
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> Any:
    """What torch calls for every group of this backend."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    try:
        engine = ShmEngine(store, rank, size, timeout.total_seconds())
    except NoSharedMemory as e:
        warnings.warn(f"the shm backend falls back to gloo: {e}", RuntimeWarning, stacklevel=2)
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    except DrumlineError as e:
        raise for_torch(e) from None
    return EngineGroup("shm", engine, store, rank, size, timeout)
