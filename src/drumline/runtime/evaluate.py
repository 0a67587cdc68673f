"""Exact metrics: every sample counts once, also when the samples do not divide over the ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..core.errors import JobError
from ..core.job import guard
from ..datasets.stream import Micro, Stream, check_dataset, split
from ..tracing.fake import call
from .precision import computing, to_device
from .weighing import weigh

if TYPE_CHECKING:
    from .engine import Engine


@torch.no_grad()
def evaluate(engine: Engine, dataset: Any = None) -> dict[str, float]:
    """The loss and the job's metrics over a dataset (the job's validation data, else its training data)."""
    job = engine.job
    if dataset is None:
        dataset = guard(job.validation, "the job's validation()") if job.validation else engine.stream.dataset
    stream = Stream(job, check_dataset(dataset), dp=engine.data_ranks, index=engine.data_index, micro=engine.plan.micro)
    sums: dict[str, torch.Tensor] = {}
    engine.module.eval()
    try:
        for part in split(len(dataset), -(-len(dataset) // job.batch_size)):
            micros = stream.cut(list(part), engine.steps).micros
            found = [engine.split.evaluate(micros)] if engine.split else [_measure(engine, micro) for micro in micros]
            for name, pair in (item for measured in found for item in measured.items()):
                sums[name] = sums.get(name, torch.zeros_like(pair)) + pair
    finally:
        engine.module.train()
    names = sorted(sums)
    table = torch.stack([sums[name] for name in names])
    if engine.ranks > 1:
        dist.all_reduce(table, group=engine.group)
    pairs = zip(names, table.tolist(), strict=True)
    return {name: total / weight if weight else math.nan for name, (total, weight) in pairs}


def _measure(engine: Engine, micro: Micro) -> dict[str, torch.Tensor]:
    """(sum, weight) of the loss and of each metric on one slice."""
    job = engine.job
    engine.begin(micro)
    value = to_device(micro.input, engine.device, engine.dtype)
    target = to_device(micro.target, engine.device, engine.dtype)
    with computing(engine.plan.precision, engine.device):
        output = call(engine.module, value)
        found = {"loss": job.loss(output, target)}
        if job.evaluate is not None:
            found.update(guard(job.evaluate, "the job's evaluate()", output, target))
    pairs = {}
    for name, result in found.items():
        if not isinstance(result, torch.Tensor | tuple | list | float | int):
            raise JobError(f"metric {name!r} is a {type(result).__name__}", rule="a metric is a mean, or (sum, weight)")
        if not isinstance(result, tuple | list):
            result = torch.as_tensor(result, dtype=torch.float64)
        total, weight, _ = weigh(job, result, value, target, micro.samples)
        pairs[name] = torch.stack([total.double(), weight.double()]).to(engine.device)
    return pairs
