"""Initial weights equal to the serial model's, without a full copy on every rank.

The first rank builds the model as one device would. Where parameters are sharded, the others (and the first, a second
time) build it on the meta device; then each tensor is broadcast once, and every rank keeps its shard.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...core.errors import JobError
from ...core.job import Job, call_user_code
from ...torchkit.fake_tensors import with_real_tensors
from ...torchkit.modules import convert_tensors
from ...tracing.fake import dtype_of
from ...tracing.fresh_model import fresh_model
from ...tracing.op_costs import tensors
from ..numerics.recurrent import note_recurrent_layers
from .pieces import BUNDLE_BYTES, ParameterPart

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes of every module: its parameters and buffers are sent under their own names."""


def seeded_model(job: Job, dtype: torch.dtype | None = None) -> nn.Module:
    """The model as one device builds it from the job's seed."""
    torch.manual_seed(job.seed)
    seed_everything(job.seed)
    model: nn.Module = call_user_code(lambda: fresh_model(job), "the job's model()")
    note_recurrent_layers(model)
    return cast(model, dtype)


def cast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model with its floating-point tensors cast to a type; complex ones stay complex.

    `model.to` would drop the imaginary part.
    """
    if dtype is None:
        return model
    if not any(t.is_complex() for t in [*model.parameters(), *model.buffers()]):
        return model.to(dtype)
    return convert_tensors(model, lambda t: t.to(dtype_of(t, dtype)))


@with_real_tensors()
def meta_model(job: Job, dtype: torch.dtype | None = None) -> nn.Module:
    """The model on the meta device, without memory for its parameters."""
    try:
        with torch.device("meta"):
            model = fresh_model(job)
    except JobError:
        raise
    except Exception as e:
        warnings.warn(
            f"the model cannot be built on the meta device ({type(e).__name__}: {str(e)[:100]}); "
            "every rank holds a full copy for a moment",
            stacklevel=2,
        )
        model = seeded_model(job).to("meta")
    note_recurrent_layers(model)
    return cast(model, dtype)


def seed_everything(seed: int) -> None:
    """Seed the generators of torch that are in use, and Python's own, which some models draw from.

    As `torch.manual_seed`, without its calls for absent kinds of devices: these inspect the stack, and cost a
    millisecond or two in every step.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    random.seed(seed)


@torch.no_grad()
def fill_sharded(
    model: nn.Module,
    source: nn.Module | None,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    parts: Mapping[str, ParameterPart],
    host: bool = False,
) -> None:
    """Give a sharded model on the meta device memory, and the values of the first rank's `source`.

    `parts`: its parameters that are parts of one of the source's; `host`: the shards are kept in host memory.
    """
    model.to_empty(device="cpu" if host else device)
    _tie(model)
    broadcast_tensors(chain(_parameters(model, source, parts), _buffers(model, source)), group, device)
    _fill_attributes(model, source, group, device)


@dataclass(frozen=True, slots=True, eq=False)
class BroadcastTensor:
    """A tensor to broadcast from the first rank."""

    value: torch.Tensor | None
    """On the first rank."""
    like: torch.Tensor
    """A tensor of its shape and type."""
    put: Callable[[torch.Tensor], object]
    """Stores it on arrival. Its memory may be shared with other tensors: store a copy."""


def _parameters(
    model: nn.Module, source: nn.Module | None, parts: Mapping[str, ParameterPart]
) -> Iterator[BroadcastTensor]:
    values = dict(source.named_parameters()) if source is not None else {}
    for name, p in model.named_parameters():
        part = parts.get(name)
        value: torch.Tensor | None = values.get(part.name if part else name)
        if part and value is not None:
            value = value.detach().flatten()[part.start : part.start + p.numel()].view(p.shape)
        yield BroadcastTensor(value, p, functools.partial(_copy_shard, p))


def _copy_shard(p: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's rows of a parameter."""
    if not isinstance(p, DTensor):
        p.copy_(whole)
        return
    rows = -(-p.shape[0] // _shards(p)) if p.dim() else 0
    start = rows * _shard_index(p)
    p.to_local().copy_(whole[start : start + rows])


def _buffers(model: nn.Module, source: nn.Module | None) -> Iterator[BroadcastTensor]:
    values = dict(source.named_buffers()) if source is not None else {}
    for module_name, module in model.named_modules():
        for key, b in list(module._buffers.items()):
            if b is not None:
                name = f"{module_name}.{key}" if module_name else key
                yield BroadcastTensor(values.get(name), b, functools.partial(_store, module._buffers, key))


def _store(table: dict[str, torch.Tensor | None], key: str, whole: torch.Tensor) -> None:
    table[key] = whole.clone()


def _shards(p: DTensor) -> int:
    """Number of shards of a parameter: the last axis of its mesh."""
    return p.device_mesh.size(p.device_mesh.ndim - 1)


def _shard_index(p: DTensor) -> int:
    return p.device_mesh.get_local_rank(p.device_mesh.ndim - 1)


def _tie(model: nn.Module) -> None:
    """Tie parameters again: moving off the meta device makes one tensor per name."""
    from ...torchkit.fsdp import parameter_group, place_of

    for module in model.modules():
        group = parameter_group(module)
        for parameter in group.fsdp_params if group else []:
            info = place_of(parameter)
            first = getattr(info.module, info.param_name)
            for other, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                other._parameters[name] = first


def _fill_attributes(
    model: nn.Module, source: nn.Module | None, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Broadcast the tensors that modules keep as plain attributes or in lists: no buffers, but a forward reads them."""
    sources = dict(source.named_modules()) if source is not None else {}

    def receive(value: Any, mine: Any) -> Any:
        if isinstance(value, torch.Tensor):
            copies: list[torch.Tensor] = []
            broadcast_tensors([BroadcastTensor(mine, value, lambda whole: copies.append(whole.clone()))], group, device)
            return copies[0]
        if type(value) in (list, tuple):
            return type(value)(receive(v, None if mine is None else mine[i]) for i, v in enumerate(value))
        if type(value) is dict:
            return {k: receive(v, None if mine is None else mine[k]) for k, v in value.items()}
        return value

    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in MODULE_ATTRIBUTES and tensors(value):
                setattr(module, key, receive(value, getattr(sources[name], key) if sources else None))


def broadcast_tensors(items: Iterable[BroadcastTensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Broadcast tensors from the first rank, small ones together. Without a group, every rank has their values."""
    run: list[BroadcastTensor] = []
    for item in items:
        if run and (item.like.dtype != run[0].like.dtype or sum(map(_bytes, [*run, item])) > BUNDLE_BYTES):
            _broadcast_run(run, group, device)
            run = []
        run.append(item)
    if run:
        _broadcast_run(run, group, device)


def _broadcast_run(run: list[BroadcastTensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
    dtype, sizes = run[0].like.dtype, [item.like.numel() for item in run]
    if len(run) == 1 and run[0].value is not None:  # a large one is not copied
        flat = run[0].value.detach().to(device=device, dtype=dtype).contiguous().view(-1)
    else:
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        for item, place in zip(run, flat.split(sizes), strict=True):
            if item.value is not None:
                place.copy_(item.value.detach().reshape(-1))
    places = flat.split(sizes)
    if group is not None:
        dist.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, group=group, group_src=0)
    for item, place in zip(run, places, strict=True):
        item.put(place.view(item.like.shape))


def _bytes(item: BroadcastTensor) -> int:
    return item.like.numel() * item.like.element_size()
