"""Tensor parallelism by hand with torch's `parallelize_module`, with and without norms on parts of the sequence.

Columns, then rows, the embedding by its rows, the head by its columns and the loss on parts of the classes: what
Drumline chooses for this model, which also keeps the sequence split between the blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gpt_task import GPT, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .work import CLIP, Step, Work


def make(work: Work) -> Step:
    """With the sequence split between the blocks."""
    return _step(work, _split(work.model(), sequence=True))


def make_plain(work: Work) -> Step:
    """With the whole sequence on every rank between the blocks."""
    return _step(work, _split(work.model(), sequence=False))


def _split(model: GPT, *, sequence: bool) -> GPT:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    between: Any = Shard(1) if sequence else Replicate()
    outside: dict[str, Any] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    inside: dict[str, Any] = {
        "attention": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        outside["norm"] = SequenceParallel()
        inside |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    parallelize_module(model, mesh, outside)
    for block in model.blocks:
        parallelize_module(block, mesh, inside)
    return model


def _step(work: Work, model: GPT) -> Step:
    # a fused update takes either kind of tensor, but not both at once
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    optimizers = [work.job.optimizer(some) for some in kinds if some]

    def step(number: int) -> float:
        x, y = work.pair(number)
        with loss_parallel():
            loss = loss_of(model(x), y)
            loss.backward()
        _clip(kinds)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return _number(loss)

    return step


def _clip(kinds: list[list[torch.nn.Parameter]]) -> None:
    norms = [torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]) for some in kinds if some]
    norm = torch.tensor([_number(n) for n in norms]).norm()
    for some in kinds:
        torch.nn.utils.clip_grads_with_norm_(some, CLIP, norm)


def _number(value: torch.Tensor) -> float:
    return value.full_tensor().item() if isinstance(value, DTensor) else value.item()
