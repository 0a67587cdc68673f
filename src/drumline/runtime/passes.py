"""The first half of a step: forward and backward of every micro-batch, and what is then known of it on all ranks.

`run_passes` only tells a GPU what to do; `read` is where the host waits for it. So the update can be told in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..core.errors import JobError
from ..datasets.stream import Batch, mix
from .precision import computing, multiplying
from .weights import seed_everything

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What is known of a step before its update, perhaps by the device alone."""

    found: torch.Tensor
    """The sums of losses and of their weights, parameters that were not reached, the square of the norm."""
    samples: int | None
    """Samples of the batch, where the loss has weights of its own."""
    scale: float
    """What the loss was multiplied by."""


def run_passes(engine: Engine, batch: Batch) -> Facts:
    """Forward and backward of every micro-batch, and the norm of the gradients."""
    scale = engine.scaler.scale if engine.scaler else 1.0
    if engine.split:
        engine.split.begin()
    if engine.split and engine.split.places.pipelined:
        (total, weight), weighted = _in_stages(engine, batch, scale)
    else:
        (total, weight), weighted = _one_by_one(engine, batch, scale)
    engine.local_loss = total
    with engine.phase("communication"):
        # a small model has its GPU wait for every operator that a host starts here
        sums = torch.stack([total, weight, total.new_zeros(())])
        if engine.split and not engine.split.places.counts:
            sums.zero_()  # another rank counts these samples
        unseen = engine.strategy.unseen()
        if unseen:
            sums[2] = unseen
        if engine.ranks > 1:
            with engine.record.message("all_reduce", sums):
                dist.all_reduce(sums, group=engine.group)
        engine.strategy.gather_gradients()
        return Facts(torch.cat([sums, engine.update.square()]), batch.samples if weighted else None, scale)


Sums = tuple[torch.Tensor, torch.Tensor]
"""Of this rank's losses, and of their weights; in double precision."""


def _one_by_one(engine: Engine, batch: Batch, scale: float) -> tuple[Sums, bool]:
    """The micro-batches one after the other: what they sum to, and whether the loss has weights of its own."""
    weighted, precision, strategy = False, engine.plan.precision, engine.strategy
    # the sum over the ranks is divided by `divides`, so each contributes that many times its own
    factor = strategy.divides * scale / batch.samples
    found = []
    for i, micro in enumerate(batch.micros):
        seed_everything(mix(engine.job.seed, engine.position, i, engine.data_index))
        with strategy.accumulate(last=i == len(batch.micros) - 1), multiplying(precision):
            with engine.phase("forward"), computing(precision, engine.device):
                total, weight, given = engine.loss_of(micro)
            weighted |= given
            with engine.phase("backward"):
                total.backward(torch.full((), factor, dtype=total.dtype, device=total.device))
            found.append((total.detach().double(), weight))
    return _added(found, engine.device), weighted


def _in_stages(engine: Engine, batch: Batch, scale: float) -> tuple[Sums, bool]:
    """The micro-batches through the stages of a pipeline, in the same way."""
    assert engine.split is not None
    factor = engine.strategy.divides * scale / batch.samples

    def seed(stage: int, micro: int) -> None:
        seed_everything(mix(engine.job.seed, engine.position, micro, engine.data_index, stage))

    with engine.strategy.accumulate(last=False), multiplying(engine.plan.precision):
        losses, weighted = engine.split.train(batch.micros, factor, seed, engine.phase)
    with engine.phase("communication"):
        engine.split.finish()
    return _added([(total.double(), weight.double()) for total, weight, *_ in losses], engine.device), weighted


def _added(found: list[Sums], device: torch.device) -> Sums:
    """What the micro-batches sum to, one after the other."""
    if not found:  # another stage has the losses
        return torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.float64, device=device)
    total, weight = found[0]
    for more, heavier in found[1:]:
        total, weight = total + more, weight + heavier
    return total, weight


def read(engine: Engine, facts: Facts) -> tuple[float, float]:
    """The mean loss, and what the gradients are to be multiplied by. The host waits for a GPU only here."""
    with engine.phase("communication"):
        loss_sum, weight_sum, unseen, square = engine.numbers(facts.found)
        if unseen:
            engine.strategy.drop_unseen()
    if not weight_sum:
        raise JobError(f"step {engine.steps}: the batch has no weight", rule="the weights of a batch add up to > 0")
    loss = float(loss_sum / weight_sum)
    factor = (1.0 if facts.samples is None else facts.samples / weight_sum) / facts.scale
    engine.grad_norm = factor * math.sqrt(square) if square >= 0 else math.nan
    return loss, factor
