"""ZeRO-3, on torch's FSDP2: parameters, gradients and optimizer state lie in equal shards over the ranks.

Before a layer runs, its parameters are gathered; after it they are dropped again; in the backward they are gathered
once more, and the gradients are summed and scattered. Every micro-batch does so: no rank ever holds a whole gradient.
Under bf16 the gathered copy is bf16 (half the bytes travel), and gradients are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..errors import PlanError
from ..trace.layers import layers_of
from .strategy import Strategy


class Shard(Strategy):
    """One copy over all ranks of the mesh's one axis."""

    def __init__(self, mesh: DeviceMesh, *, precision: str) -> None:
        self._mesh = mesh
        self._policy = MixedPrecisionPolicy()
        if precision == "bf16":
            # autocast decides what is computed in bf16; here only the gathered copy is, and inputs stay as they are
            self._policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        for name, p in model.named_parameters():
            if p.dim() == 0:
                raise PlanError(
                    f"parameter {name!r} cannot be sharded",
                    rule="zero=3 cuts parameters along their first dim; a single number has none",
                    fix="zero=0, or make it a tensor of one number",
                )
        for spec in layers_of(model):
            if spec.unit:
                fully_shard(spec.module, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._policy)
        fully_shard(model, mesh=self._mesh, mp_policy=self._policy)
        return model

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        yield

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def add_up(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value, group=self._mesh.get_group())
        return value

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
