"""The reference that every plan must equal: one device, in a plain loop that shares no code with the engine's step.

It runs the plan's micro-batches, because samples of a micro-batch may affect each other (BatchNorm statistics).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ...core.job import Job, call_user_code
from ...datasets.sources import load_data
from ...datasets.stream import Stream
from ...tracing.fake import call_model
from ..numerics.precision import compute_precision, float32_arithmetic, to_device
from ..state.optimizer import waits_for_metric
from ..state.weights import seeded_model


def run_reference(
    job: Job,
    *,
    micro: int,
    steps: int,
    device: torch.device,
    dtype: torch.dtype | None,
    precision: str,
    scale: float = 1.0,
    prepare: Callable[[nn.Module], None],
    before_micro: Callable[[int, int], None],
    before_update: Callable[[int, nn.Module], None],
    reading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[list[float], nn.Module]:
    """Train `steps` steps on one device; returns the loss of each step and the trained model.

    `scale` is a fixed loss scale, without which fp16 gradients underflow. `reading` is entered where data is read.
    """
    model = seeded_model(job, dtype).to(device).train()
    optimizer = job.optimizer_on((n, p) for n, p in model.named_parameters() if p.requires_grad)
    prepare(model)
    schedule = job.schedule(optimizer) if job.schedule else None
    with reading():
        stream = Stream(job, load_data(job), micro=micro)
    losses = []
    for step in range(steps):
        loss_sum, weight_sum = 0.0, 0.0
        with reading():
            micros = stream.batch(step).micros
        for i, part in enumerate(micros):
            before_micro(step, i)
            value, target = to_device(part.input, device, dtype), to_device(part.target, device, dtype)
            count = f"{part.samples} sample{'s' if part.samples > 1 else ''}"
            place = f"one device, in micro-batch {i + 1} of step {step + 1}, which has {count},"
            with float32_arithmetic(precision, device), compute_precision(precision, device):
                loss = call_user_code(lambda v=value, t=target: job.loss(call_model(model, v), t), place)
            if isinstance(loss, tuple | list):
                total, weight = loss[0], float(loss[1])
            else:
                weight = float(job.sample_weight(value, target)) if job.sample_weight else float(part.samples)
                total = torch.where(torch.tensor(weight > 0, device=loss.device), loss * weight, 0.0)
            with float32_arithmetic(precision, device):
                (total * scale).backward()
            loss_sum, weight_sum = loss_sum + float(total.detach()), weight_sum + weight
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for g in gradients:
            g.div_(weight_sum * scale)
        if job.clip is not None:
            norm = torch.sqrt(torch.stack([g.abs().double().square().sum() for g in gradients]).sum())
            share = min(1.0, job.clip / (float(norm) + 1e-6))
            for g in gradients:
                g.mul_(share)
        before_update(step, model)
        optimizer.step()
        if schedule is not None and not waits_for_metric(schedule):
            schedule.step()
        model.zero_grad()  # also of parameters that the optimizer does not have
        losses.append(loss_sum / weight_sum)
    return losses, model
