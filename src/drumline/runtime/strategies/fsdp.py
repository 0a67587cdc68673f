"""ZeRO-3, on torch's FSDP2: parameters, gradients and optimizer state are sharded equally over the ranks.

Before a layer runs, its parameters are gathered; after it they are freed; in the backward they are gathered again, and
the gradients are reduce-scattered. Every micro-batch does so: no rank ever has a whole gradient. Under bf16 and fp16
the gathered copy is of that type (half the bytes are sent), and gradients are summed in fp32. With `shard` < `dp` a
copy is sharded over `shard` ranks, and gradients are then summed over the copies. With `offload=all` the shards are in
host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...core.errors import PlanError
from ...core.job import user_line
from ...plans import Plan
from ...torchkit.fake_tensors import agreed_numbers, with_real_tensors
from ...torchkit.fsdp import has_full_gradient, parameter_group, place_of
from ...tracing.layers import layers_of
from ..memory.tiled_layers import TiledLayer
from ..memory.tiling import tiles_of
from ..numerics.precision import HALVES
from ..numerics.recurrent import keep_in_place
from ..state.pieces import Piece
from ..state.recorded_engines import record_fsdp
from .strategy import Strategy


class FullyShard(Strategy):
    """One copy sharded over the mesh's axis `shard`."""

    counts_unreached = True

    def __init__(
        self, mesh: DeviceMesh, plan: Plan, device: torch.device, outside: Collection[str] = frozenset()
    ) -> None:
        """`outside`: layers whose weights other layers read, which are no units of their own."""
        self._outside = outside
        names = mesh.mesh_dim_names or ()
        self._mesh = mesh
        self._axis = mesh["shard"] if len(names) > 1 else mesh
        self.group = self._axis.get_group()
        self.gradient_divisor = mesh.size()
        self._policy = MixedPrecisionPolicy()
        if plan.precision in HALVES and plan.precision != "bf16-pure":  # its shards and gradients are in bf16 already
            # autocast decides what is computed in half precision; this casts the gathered copy only, not the inputs
            self._policy = MixedPrecisionPolicy(
                param_dtype=HALVES[plan.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        self._offload = OffloadPolicy()
        if plan.offload == "all" and device.type != "cpu":
            self._offload = CPUOffloadPolicy(pin_memory=True)
        self._model: nn.Module
        self._shards: list[tuple[Piece, nn.Parameter]] = []
        self._reached: set[str] = set()
        """The parameters that this rank's backward has reached in any micro-batch of the step."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self._model = model
        for name, p in model.named_parameters():
            if p.dim() == 0:
                raise PlanError(
                    f"parameter {name!r} cannot be sharded",
                    rule="zero=3 cuts parameters along their first dim; a single number has none",
                    fix="zero=2, or make it a tensor of one number",
                )
        for part in tiles_of(model):
            unit = self._shard(part, reshard=True)
            unit.set_modules_to_backward_prefetch([unit])  # none but itself: one part is whole at a time
        for spec in layers_of(model):
            if spec.unit and spec.name not in self._outside and not isinstance(spec.module, TiledLayer):
                self._shard(spec.module, reshard=True)
        self._record_gradients(self._shard(model, reshard=None))
        model.forward = _explained(model.forward)
        keep_in_place(model)
        if self.record is not None:
            record_fsdp(self.record, model)
        return model

    @with_real_tensors()  # for a thousand ranks, torch makes a thousand parts of every parameter here
    def _shard(self, module: nn.Module, *, reshard: bool | None) -> FSDPModule:
        return fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=reshard,
            mp_policy=self._policy,
            offload_policy=self._offload,
        )

    def _record_gradients(self, root: FSDPModule) -> None:
        """Make every rank send the same, whatever its backward reached, and record what it reached."""
        if hasattr(root, "set_reduce_scatter_unused_params"):  # older releases of torch send what they have
            root.set_reduce_scatter_unused_params(True)
        names = {id(m): name for name, m in self._model.named_modules()}
        for module in self._model.modules():
            group = parameter_group(module)
            if group is not None:
                _check_types(group, names)
                then = functools.partial(self._after_backward, group, group.post_backward, names)
                group.post_backward = then  # observed, not changed

    def _after_backward(self, group: Any, then: Callable[..., Any], names: Mapping[int, str], *args: Any) -> Any:
        """After a unit's backward: record which of its parameters have gradients."""
        for p in group.fsdp_params:
            if has_full_gradient(p):
                info = place_of(p)
                prefix = names[id(info.module)]
                self._reached.add(f"{prefix}.{info.param_name}" if prefix else info.param_name)
        return then(*args)

    def pieces(self) -> list[Piece]:
        self._shards = [(self._piece(name, p), p) for name, p in self._model.named_parameters()]
        return [piece for piece, _ in self._shards]

    def _piece(self, name: str, p: nn.Parameter) -> Piece:
        """A piece on a plain tensor: for the optimizer, calls on distributed tensors cost far more."""
        local = p.to_local() if isinstance(p, DTensor) else p
        rows = -(-p.shape[0] // self._axis.size())
        start = min(rows * self._axis.get_local_rank(), p.shape[0]) * prod(p.shape[1:])
        value = nn.Parameter(local.detach(), requires_grad=p.requires_grad)
        return Piece(name, tuple(p.shape), start, value)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        yield

    def gather_gradients(self) -> None:
        for piece, p in self._shards:
            piece.value.grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad

    def unreached(self) -> int:
        return sum(p.requires_grad and p.grad is not None and name not in self._reached for name, p in self._named())

    def drop_unreached(self) -> None:
        """One device would not update them; with a gradient of zero, weight decay would."""
        names = [name for name, _ in self._named()]
        own = [name in self._reached for name in names]
        reached = torch.tensor(own, dtype=torch.int32, device=self._mesh.device_type)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(reached, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        for (piece, _), was_reached in zip(self._shards, agreed_numbers(reached, own), strict=True):
            if not was_reached:
                piece.value.grad = None

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((piece.name, p) for piece, p in self._shards)

    def after_update(self) -> None:
        self.drop_gradients()

    def values_loaded(self) -> None:
        """Gather the parameters again in the next forward: an evaluation leaves those of the root gathered."""
        super().values_loaded()
        for module in self.call.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def drop_gradients(self) -> None:
        self._reached.clear()
        for piece, p in self._shards:
            piece.value.grad = p.grad = None


def _check_types(group: Any, names: Mapping[int, str]) -> None:
    """Refuse a unit whose trained parameters are of several types."""
    first: dict[torch.dtype, str] = {}
    for p in group.fsdp_params:
        if p.sharded_param.requires_grad:
            name = f"{names[id(place_of(p).module)]}.{place_of(p).param_name}".removeprefix(".")
            first.setdefault(p.sharded_param.dtype, name)
    if len(first) > 1:
        types = " and ".join(f"{name!r} is {dtype}" for dtype, name in first.items())
        raise PlanError(
            f"{types.replace('torch.', '')}, and they are of one layer",
            rule="zero=3 gathers the parameters of a layer as one tensor of one type",
            fix="zero=2, or modules of their own for the parameters of each type",
        )


def _explained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The model's forward, with a plainer error than torch's where it reads a shard instead of a weight."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as e:
            if "mixed torch.Tensor and DTensor" not in str(e):
                raise
            raise PlanError(
                "the model reads a weight while the layer that holds it does not run",
                where=user_line(e),
                rule="under zero=3 a layer's weights are whole while it runs, and shards at other times",
                fix="zero=2; or pass the data to initialize(): such reads are then detected, and allowed",
            ) from e

    return run
