"""ZeRO-3, on torch's FSDP2: parameters, gradients and optimizer state lie in equal shards over the ranks.

Before a layer runs, its parameters are gathered; after it they are dropped again; in the backward they are gathered
once more, and the gradients are summed and scattered. Every micro-batch does so: no rank ever holds a whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..trace.layers import layers_of
from .strategy import Strategy


class Shard(Strategy):
    """One copy over all ranks of the mesh's one axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def wrap(self, model: nn.Module) -> nn.Module:
        for spec in layers_of(model):
            if spec.unit:
                fully_shard(spec.module, mesh=self._mesh, reshard_after_forward=True)
        fully_shard(model, mesh=self._mesh)
        return model

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        yield

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
