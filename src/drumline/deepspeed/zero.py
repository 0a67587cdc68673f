"""`deepspeed.zero`: contexts in which a model is built and initialized before stage 3 shards it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm.environment import connect, device_of
from ..core.errors import JobError

_LOG = logging.getLogger("drumline")
REFUSED = {
    "TiledLinear": "`chunk=n` in the plan computes large layers in blocks (docs/tiling.md)",
    "register_external_parameter": "weights read outside their layer are detected: pass training_data to initialize()",
}


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        raise AttributeError(f"drumline.deepspeed.zero has no {name}: {REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def Init(
    module: nn.Module | None = None, *, enabled: bool = True, remote_device: str | None = None, **options: Any
) -> Iterator[None]:
    """Build a model inside: whole, in host memory, unlike in DeepSpeed; `initialize` shards it. A warning says so.

    The weights are those of rank 0, and sharded after `initialize`, as in DeepSpeed. Only the peak of host memory
    differs. `options` of DeepSpeed's concern where the shards are meanwhile, and there are none.
    """
    if module is not None or remote_device == "nvme":
        raise JobError(
            "zero.Init() of a finished model" if module is not None else "zero.Init(remote_device='nvme')",
            rule="initialize() shards the model, and nothing is swapped to disk",
            fix="with zero.Init(): model = ..., or leave it out",
        )
    if enabled and connect().rank == 0:
        _LOG.warning(
            "zero.Init: each rank builds the whole model in host memory, and initialize() shards it; "
            "a Job (dl.train) builds it sharded"
        )
    yield


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Whole parameters inside. What `modifier_rank` changes is sent to the others at the end; before `initialize`."""
    parameters = [params] if isinstance(params, torch.Tensor) else list(_flat(params))
    if enabled and any(isinstance(p, DTensor) for p in parameters):
        raise JobError(
            "zero.GatheredParameters() of parameters that stage 3 has sharded",
            rule="they are changed before initialize(), and read after it with engine.module_state_dict()",
            fix="move the block before initialize()",
        )
    yield
    where = connect()
    if not enabled or modifier_rank is None or where.size == 1:
        return
    device = device_of(where)
    with torch.no_grad():
        for p in parameters:
            whole = p.detach().to(device).contiguous()
            dist.broadcast(whole, src=modifier_rank)
            p.copy_(whole)


def _flat(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    if isinstance(params, nn.Module):
        params = params.parameters()
    for p in params:
        yield from [p] if isinstance(p, torch.Tensor) else _flat(p)
