"""Written by hand on torch: DDP, DDP with torch's sharded optimizer, FSDP2 without and with resharding."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from .work import ADAMW, CLIP, GPT, Step, Work, loss_of, mean_over_ranks

LABELS = {0: "DDP", 1: "DDP + ZeroRedundancyOptimizer", 2: "FSDP2, parameters kept", 3: "FSDP2"}


def shard(work: Work, model: GPT, mesh: DeviceMesh | None = None) -> None:
    """Every block is a unit, and so is what remains."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=work.stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=work.stage == 3)


def optimizer_for(work: Work, model: nn.Module) -> torch.optim.Optimizer:
    """In stage 1 each rank has the state of some of the parameters."""
    if work.stage == 1:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    return work.job.optimizer(model.parameters())


def make(work: Work) -> Step:
    model = work.model()
    module: nn.Module = model
    if work.stage >= 2:
        shard(work, model)
    else:
        module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_for(work, model)

    def step(number: int) -> float:
        x, y = work.pair(number)
        loss = loss_of(module(x), y)
        loss.backward()
        mean = mean_over_ranks(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


def make_alone(work: Work) -> Step:
    """Stage 0 without any communication, each rank by itself: the baseline for the share of communication."""
    model = work.model()
    optimizer = work.job.optimizer(model.parameters())

    def step(number: int) -> float:
        x, y = work.pair(number)
        loss = loss_of(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
