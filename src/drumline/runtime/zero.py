"""ZeRO-3, on torch's FSDP2: parameters, gradients and optimizer state lie in equal shards over the ranks.

Before a layer runs, its parameters are gathered; after it they are dropped again; in the backward they are gathered
once more, and the gradients are summed and scattered. Every micro-batch does so: no rank ever holds a whole gradient.
Under bf16 and fp16 the gathered copy is of that type (half the bytes travel), and gradients are summed in fp32. With
`shard` < `dp` a copy lies over `shard` ranks, and the copies' gradients are added up after that. With `offload=all` the
shards live in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..errors import PlanError
from ..plan import Plan
from ..trace.layers import layers_of
from .pieces import Piece
from .precision import HALVES
from .strategy import Strategy


class Shard(Strategy):
    """One copy over the ranks of the mesh's axis `shard`."""

    def __init__(self, mesh: DeviceMesh, plan: Plan, device: torch.device) -> None:
        names = mesh.mesh_dim_names or ()
        self._mesh = mesh
        self._axis = mesh["shard"] if len(names) > 1 else mesh
        self.group = self._axis.get_group()
        self.divides = mesh.size()
        self._policy = MixedPrecisionPolicy()
        if plan.precision in HALVES:
            # autocast decides what is computed in half precision; here only the gathered copy is, and inputs stay
            self._policy = MixedPrecisionPolicy(
                param_dtype=HALVES[plan.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        self._offload = OffloadPolicy()
        if plan.offload == "all" and device.type != "cpu":
            self._offload = CPUOffloadPolicy(pin_memory=True)
        self._model: nn.Module
        self._held: list[tuple[Piece, nn.Parameter]] = []

    def wrap(self, model: nn.Module) -> nn.Module:
        self._model = model
        for name, p in model.named_parameters():
            if p.dim() == 0:
                raise PlanError(
                    f"parameter {name!r} cannot be sharded",
                    rule="zero=3 cuts parameters along their first dim; a single number has none",
                    fix="zero=2, or make it a tensor of one number",
                )
        for spec in layers_of(model):
            if spec.unit:
                self._shard(spec.module, reshard=True)
        self._shard(model, reshard=None)
        return model

    def _shard(self, module: nn.Module, *, reshard: bool | None) -> None:
        fully_shard(
            module, mesh=self._mesh, reshard_after_forward=reshard, mp_policy=self._policy,
            offload_policy=self._offload,
        )  # fmt: skip

    def pieces(self) -> list[Piece]:
        self._held = [(self._piece(name, p), p) for name, p in self._model.named_parameters()]
        return [piece for piece, _ in self._held]

    def _piece(self, name: str, p: nn.Parameter) -> Piece:
        """The optimizer works on plain tensors, which costs far less per call than on distributed ones."""
        local = p.to_local() if isinstance(p, DTensor) else p
        rows = -(-p.shape[0] // self._axis.size())
        start = min(rows * self._axis.get_local_rank(), p.shape[0]) * prod(p.shape[1:])
        value = nn.Parameter(local.detach(), requires_grad=p.requires_grad)
        return Piece(name, tuple(p.shape), start, value)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        yield

    def gather_gradients(self) -> None:
        for piece, p in self._held:
            piece.value.grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad

    def updated(self) -> None:
        self.forget()

    def forget(self) -> None:
        for piece, p in self._held:
            piece.value.grad = p.grad = None
