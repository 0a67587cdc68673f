"""Weights equal to the serial model's, without every rank holding a full copy.

The first rank builds the model as one device would. Where parameters are sharded, the others (and the first, a second
time) build its shape alone; then each tensor travels once, and every rank keeps its shard of it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import JobError
from ..job import Job, guard
from ..trace.kinds import tensors
from ..trace.running import with_values
from .strategies.pieces import Part

_OF_TORCH = frozenset(vars(nn.Module()))
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
    return model if dtype is None else model.to(dtype)


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
    return model if dtype is None else model.to(dtype)


def seed_everything(seed: int) -> None:
    """torch's generators that are in use, and Python's own, which some models draw from.

    What `torch.manual_seed` does, without its calls for kinds of devices that are not there: these look at the stack,
    and cost a millisecond or two, in every step.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
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
    values = dict(source.named_parameters()) if source is not None else {}
    for name, p in model.named_parameters():
        part = parts.get(name)
        value: torch.Tensor | None = values.get(part.name if part else name)
        if part and value is not None:
            value = value.detach().flatten()[part.start : part.start + p.numel()].view(p.shape)
        whole = _send(value, p.shape, p.dtype, group, device)
        local = p.to_local() if isinstance(p, DTensor) else p
        rows = -(-p.shape[0] // _shards(p)) if isinstance(p, DTensor) and p.dim() else 0
        start = rows * _shard_index(p) if isinstance(p, DTensor) else 0
        local.copy_(whole[start : start + rows] if isinstance(p, DTensor) else whole)
    held = dict(source.named_buffers()) if source is not None else {}
    for module_name, module in model.named_modules():
        for key, b in list(module._buffers.items()):
            if b is not None:
                name = f"{module_name}.{key}" if module_name else key
                module._buffers[key] = _send(held.get(name), b.shape, b.dtype, group, device)
    _fill_attributes(model, source, group, device)


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
            return _send(mine, value.shape, value.dtype, group, device)
        if type(value) in (list, tuple):
            return type(value)(carry(v, None if mine is None else mine[i]) for i, v in enumerate(value))
        if type(value) is dict:
            return {k: carry(v, None if mine is None else mine[k]) for k, v in value.items()}
        return value

    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in _OF_TORCH and tensors(value):
                setattr(module, key, carry(value, getattr(held[name], key) if held else None))


def _send(
    value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """One tensor from the first rank to all."""
    if value is None:
        whole = torch.empty(shape, dtype=dtype, device=device)
    else:
        whole = value.detach().to(device=device, dtype=dtype).contiguous()
    dist.broadcast(whole, group=group, group_src=0)
    return whole
