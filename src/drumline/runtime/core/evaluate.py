"""Exact metrics: every sample counts once, even if the samples do not divide over the ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...core.job import call_user_code
from ...datasets.stream import Stream, check_dataset, split_range

if TYPE_CHECKING:
    from .engine_core import EngineCore


@torch.no_grad()
def evaluate(engine: EngineCore, dataset: Any = None) -> dict[str, float]:
    """The loss and the job's metrics over a dataset (the job's validation data, else its training data)."""
    job = engine.job
    if dataset is None:
        dataset = call_user_code(job.validation, "the job's validation()") if job.validation else engine.stream.dataset
    stream = Stream(job, check_dataset(dataset), dp=engine.data_ranks, index=engine.data_index, micro=engine.plan.micro)
    sums: dict[str, torch.Tensor] = {}
    engine.module.eval()
    try:
        for part in split_range(len(dataset), -(-len(dataset) // job.batch_size)):
            micros = stream.cut(list(part), engine.steps).micros
            for measured in engine.strategy.evaluate(micros):
                for name, pair in measured.items():
                    sums[name] = sums.get(name, torch.zeros_like(pair)) + pair
    finally:
        engine.module.train()
    names = sorted(sums)
    table = torch.stack([sums[name] for name in names])
    if engine.ranks > 1:
        dist.all_reduce(table, group=engine.group)
    pairs = zip(names, table.tolist(), strict=True)
    return {name: total / weight if weight else math.nan for name, (total, weight) in pairs}
