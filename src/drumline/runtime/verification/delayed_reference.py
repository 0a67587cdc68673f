"""The reference of pipelines that do not drain: one device that applies each gradient with the delay of its stage.

A direct simulation in one process, in a plain loop that shares no code with the engine or the schedules. With w(k) for
the weights after k updates, batch t is computed on w(max(d, t - delay)) in every stage, and its gradient is applied to
w(t); d is the batch at which the pipeline was last empty. Under pipedream the delay of stage s of p is p - 1 - s, and
under pipedream-2bw it is 1 for all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ...core.job import Job, call_user_code
from ...datasets.sources import load_data
from ...datasets.stream import RankMicroBatch, Stream
from ...tracing.fake import call_model
from ..numerics.precision import compute_precision, float32_arithmetic, to_device
from ..state.optimizer import waits_for_metric
from ..state.weights import seeded_model

Weights = dict[str, torch.Tensor]


def run_delayed_reference(
    job: Job,
    *,
    delay: Mapping[str, int],
    drains: Collection[int] = (),
    micro: int,
    steps: int,
    device: torch.device,
    dtype: torch.dtype | None,
    precision: str,
    prepare: Callable[[nn.Module], None],
    before_micro: Callable[[int, int], None],
    before_update: Callable[[int, nn.Module], None],
    reading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[list[float], nn.Module]:
    """Train `steps` steps; returns the loss of each batch, on the weights it met, and the model after all updates.

    `delay` is that of each parameter; `drains` are the numbers of batches after which the pipeline was emptied.
    `reading` is entered where data is read.
    """
    model = seeded_model(job, dtype).to(device).train()
    optimizer = job.optimizer_on((n, p) for n, p in model.named_parameters() if p.requires_grad)
    prepare(model)
    schedule = job.schedule(optimizer) if job.schedule else None
    with reading():
        stream = Stream(job, load_data(job), micro=micro)
    history = [_copy(model)]
    losses, empty = [], 0
    for step in range(steps):
        if step in drains:
            empty = step
        _load(model, {name: history[max(empty, step - delay[name])][name] for name in history[step]})
        loss_sum = weight_sum = 0.0
        with reading():
            micros = stream.batch(step).micros
        for i, part in enumerate(micros):
            before_micro(step, i)
            with float32_arithmetic(precision, device):
                total, weight = _loss_of(job, model, part, device, dtype, precision)
                total.backward()
            loss_sum, weight_sum = loss_sum + float(total.detach()), weight_sum + weight
        _load(model, history[step])
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for g in gradients:
            g.div_(weight_sum)
        if job.clip is not None:
            norm = torch.sqrt(torch.stack([g.abs().double().square().sum() for g in gradients]).sum())
            for g in gradients:
                g.mul_(min(1.0, job.clip / (float(norm) + 1e-6)))
        before_update(step, model)
        optimizer.step()
        if schedule is not None and not waits_for_metric(schedule):
            schedule.step()
        model.zero_grad()  # also of parameters that the optimizer does not have
        history.append(_copy(model))
        losses.append(loss_sum / weight_sum)
    return losses, model


def _loss_of(
    job: Job, model: nn.Module, part: RankMicroBatch, device: torch.device, dtype: torch.dtype | None, precision: str
) -> tuple[torch.Tensor, float]:
    """Sum and weight of a micro-batch's loss."""
    value, target = to_device(part.input, device, dtype), to_device(part.target, device, dtype)
    with compute_precision(precision, device):
        loss = call_user_code(lambda: job.loss(call_model(model, value), target), "one device")
    if isinstance(loss, tuple | list):
        return loss[0], float(loss[1])
    weight = float(job.sample_weight(value, target)) if job.sample_weight else float(part.samples)
    return torch.where(torch.tensor(weight > 0, device=loss.device), loss * weight, 0.0), weight


def _copy(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def _load(model: nn.Module, weights: Weights) -> None:
    for name, p in model.named_parameters():
        p.copy_(weights[name])
