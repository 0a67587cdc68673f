"""Weights equal to the serial model's, without every rank holding a full copy.

The first rank builds the model as one device would. Where parameters are sharded, the others (and the first, a second
time) build its shape alone; then each tensor travels once, and every rank keeps its shard of it.
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

from ..core.errors import JobError
from ..core.job import Job, guard
from ..tracing.fake import dtype_of
from ..tracing.kinds import tensors
from ..tracing.running import with_values
from .recurrent import notice
from .strategies.pieces import BUNDLE, Part

OF_TORCH = frozenset(vars(nn.Module()))
"""What every module keeps: its parameters and buffers are sent under their own names."""


def seeded_model(job: Job, dtype: torch.dtype | None = None) -> nn.Module:
    """The model as one device builds it from the job's seed."""
    torch.manual_seed(job.seed)
    seed_everything(job.seed)
    model = guard(job.model, "the job's model()")
    if not isinstance(model, nn.Module):
        raise JobError(f"the job's model() gave {type(model).__name__}", rule="it returns a torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(f"{type(model).__name__} has no parameter to train", rule="at least one with requires_grad")
    notice(model)
    return cast(model, dtype)


def cast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model with its floating-point numbers of a type; complex ones keep both of their parts.

    `model.to` would make them real, and forget the imaginary part.
    """
    if dtype is None:
        return model
    if not any(t.is_complex() for t in [*model.parameters(), *model.buffers()]):
        return model.to(dtype)
    made: nn.Module = model._apply(lambda t: t.to(dtype_of(t, dtype)))
    return made


@with_values()
def shape_of_model(job: Job, dtype: torch.dtype | None = None) -> nn.Module:
    """The model without memory for its parameters."""
    try:
        with torch.device("meta"):
            model = job.model()
    except Exception as e:
        warnings.warn(
            f"the model cannot be built without its memory ({type(e).__name__}: {str(e)[:100]}); "
            "every rank held a full copy for a moment",
            stacklevel=2,
        )
        model = seeded_model(job).to("meta")
    notice(model)
    return cast(model, dtype)


def seed_everything(seed: int) -> None:
    """torch's generators that are in use, and Python's own, which some models draw from.

    What `torch.manual_seed` does, without its calls for kinds of devices that are not there: these look at the stack,
    and cost a millisecond or two, in every step.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    random.seed(seed)


@torch.no_grad()
def fill(
    model: nn.Module,
    source: nn.Module | None,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    parts: Mapping[str, Part],
    host: bool = False,
) -> None:
    """Give a sharded model without memory the values that the first rank's `source` has.

    `parts` tells which of its parameters are parts of one of the source's; `host`: the shards live in host memory.
    """
    model.to_empty(device="cpu" if host else device)
    _tie(model)
    send(chain(_parameters(model, source, parts), _buffers(model, source)), group, device)
    _fill_attributes(model, source, group, device)


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A tensor that every rank gets from the first."""

    value: torch.Tensor | None
    """On the first rank."""
    like: torch.Tensor
    """What has its shape and type."""
    put: Callable[[torch.Tensor], object]
    """What is done with it where it arrives. It may share its memory with others: what is kept is a copy."""


def _parameters(model: nn.Module, source: nn.Module | None, parts: Mapping[str, Part]) -> Iterator[Parcel]:
    values = dict(source.named_parameters()) if source is not None else {}
    for name, p in model.named_parameters():
        part = parts.get(name)
        value: torch.Tensor | None = values.get(part.name if part else name)
        if part and value is not None:
            value = value.detach().flatten()[part.start : part.start + p.numel()].view(p.shape)
        yield Parcel(value, p, functools.partial(_keep, p))


def _keep(p: torch.Tensor, whole: torch.Tensor) -> None:
    """This rank's rows of a parameter."""
    if not isinstance(p, DTensor):
        p.copy_(whole)
        return
    rows = -(-p.shape[0] // _shards(p)) if p.dim() else 0
    start = rows * _shard_index(p)
    p.to_local().copy_(whole[start : start + rows])


def _buffers(model: nn.Module, source: nn.Module | None) -> Iterator[Parcel]:
    held = dict(source.named_buffers()) if source is not None else {}
    for module_name, module in model.named_modules():
        for key, b in list(module._buffers.items()):
            if b is not None:
                name = f"{module_name}.{key}" if module_name else key
                yield Parcel(held.get(name), b, functools.partial(_hold, module._buffers, key))


def _hold(table: dict[str, torch.Tensor | None], key: str, whole: torch.Tensor) -> None:
    table[key] = whole.clone()


def _shards(p: DTensor) -> int:
    """Over how many ranks a parameter lies: the last axis of its mesh."""
    return p.device_mesh.size(p.device_mesh.ndim - 1)


def _shard_index(p: DTensor) -> int:
    return p.device_mesh.get_local_rank(p.device_mesh.ndim - 1)


def _tie(model: nn.Module) -> None:
    """Moving off the meta device makes a tensor per name; the parameters that FSDP shares must be one again."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group else []:
            info = parameter._module_info
            first = getattr(info.module, info.param_name)
            for other, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                other._parameters[name] = first


def _fill_attributes(
    model: nn.Module, source: nn.Module | None, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Tensors that a module keeps as plain attributes or in lists are no buffers, but its forward reads them."""
    held = dict(source.named_modules()) if source is not None else {}

    def carry(value: Any, mine: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found: list[torch.Tensor] = []
            send([Parcel(mine, value, lambda whole: found.append(whole.clone()))], group, device)
            return found[0]
        if type(value) in (list, tuple):
            return type(value)(carry(v, None if mine is None else mine[i]) for i, v in enumerate(value))
        if type(value) is dict:
            return {k: carry(v, None if mine is None else mine[k]) for k, v in value.items()}
        return value

    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in OF_TORCH and tensors(value):
                setattr(module, key, carry(value, getattr(held[name], key) if held else None))


def send(parcels: Iterable[Parcel], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Tensors from the first rank to all: each travels once, small ones together. No group: every rank has them."""
    run: list[Parcel] = []
    for parcel in parcels:
        if run and (parcel.like.dtype != run[0].like.dtype or sum(map(_bytes, [*run, parcel])) > BUNDLE):
            _sent(run, group, device)
            run = []
        run.append(parcel)
    if run:
        _sent(run, group, device)


def _sent(run: list[Parcel], group: dist.ProcessGroup | None, device: torch.device) -> None:
    dtype, sizes = run[0].like.dtype, [parcel.like.numel() for parcel in run]
    if len(run) == 1 and run[0].value is not None:  # a large one is not copied
        flat = run[0].value.detach().to(device=device, dtype=dtype).contiguous().view(-1)
    else:
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        for parcel, place in zip(run, flat.split(sizes), strict=True):
            if parcel.value is not None:
                place.copy_(parcel.value.detach().reshape(-1))
    places = flat.split(sizes)
    if group is not None:
        dist.broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, group=group, group_src=0)
    for parcel, place in zip(run, places, strict=True):
        parcel.put(place.view(parcel.like.shape))


def _bytes(parcel: Parcel) -> int:
    return parcel.like.numel() * parcel.like.element_size()
