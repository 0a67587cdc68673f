"""The first half of a step: forward and backward of every micro-batch, and the sums over all ranks that step together.

`forward_backward` only launches work on a GPU; `read_sums` is where the host waits for it. So the update can be
launched in between.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...core.errors import JobError
from ...datasets.seeding import mix_seed
from ...datasets.stream import RankBatch
from ..numerics.constants import constant
from ..state.weights import seed_everything
from ..strategies.strategy import MicroLoss, StepContext

if TYPE_CHECKING:
    from .engine_core import EngineCore


@dataclass(frozen=True, slots=True, eq=False)
class StepSums:
    """Sums over the ranks that step together, before the update, on the device."""

    values: torch.Tensor
    """Sum of losses, sum of their weights, number of unreached parameters, squared gradient norm."""
    samples: int | None
    """Samples of the batch, if the job weights the loss itself."""
    scale: float
    """The loss scale."""


def forward_backward(engine: EngineCore, batch: RankBatch) -> StepSums:
    """Forward and backward of every micro-batch, and the norm of the gradients."""
    scale = engine.scaler.scale if engine.scaler else 1.0
    plan, strategy = engine.plan, engine.strategy

    def seed(micro: int, *stage: int) -> None:
        seed_everything(mix_seed(engine.job.seed, engine.position, micro, engine.data_index, *stage))

    step = StepContext(plan.precision, engine.device, scale, engine.loss_of, engine.phase, seed)
    losses, weighted = strategy.forward_backward(batch, step)
    engine.losses_ready([total for total, _ in losses])
    total, weight = _added(losses, engine.device)
    engine.local_loss = total
    with engine.phase("communication"):
        # for a small model every operator counts that the host launches here
        if not strategy.counts_loss:
            total = weight = constant(0.0, total)
        sums = [total, weight, constant(float(strategy.unreached()), total)]
        if engine.step_ranks > 1:
            values = torch.stack(sums)
            with engine.record.message("all_reduce", values):
                dist.all_reduce(values, group=engine.group)
            strategy.gather_gradients()
            values = torch.cat([values, engine.update.square().reshape(1)])
        else:
            strategy.gather_gradients()
            values = torch.stack([*sums, engine.update.square()])
        return StepSums(values, strategy.samples_of(batch) if weighted else None, scale)


def _added(losses: list[MicroLoss], device: torch.device) -> MicroLoss:
    """The losses of the micro-batches, summed in their order."""
    if not losses:  # another stage has the losses
        return torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.float64, device=device)
    total, weight = losses[0]
    for more, heavier in losses[1:]:
        total, weight = total + more, weight + heavier
    return total, weight


def read_sums(engine: EngineCore, sums: StepSums) -> tuple[float, float]:
    """The mean loss, and the factor to multiply the gradients by. The host waits for a GPU only here."""
    # one rank waits for no message, a CPU has the numbers, and a phase takes a host some microseconds
    with engine.phase("communication") if engine.ranks > 1 and sums.values.is_cuda else nullcontext():
        loss_sum, weight_sum, unreached, square = engine.read_numbers(sums.values)
        if unreached:
            engine.strategy.drop_unreached()
    engine.loss_weight = weight_sum
    if not weight_sum:
        if not engine.strategy.steps_alone:
            raise JobError(f"step {engine.steps}: the batch has no weight", rule="the weights of a batch add up to > 0")
        engine.grad_norm = 0.0
        return 0.0, 0.0  # this replica has no samples, others may
    loss = float(loss_sum / weight_sum)
    factor = (1.0 if sums.samples is None else sums.samples / weight_sum) / sums.scale
    engine.grad_norm = factor * math.sqrt(square) if square >= 0 else math.nan
    return loss, factor
