"""Steps on a GPU: a small one, which the host bounds, tells what it costs to start an operator; large ones, which the
device bounds, tell how much slower kernels are amid others than alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..cluster import Device
from ..cost.work import Pricer
from ..job import Job
from ..runtime.memory.selective import recompute_selectively
from ..trace import trace
from ..trace.fused import prefer_fused
from .blocks import Attention, Residual
from .clock import clock_ahead

PRECISION = "bf16"
BLOCKS = 4
SLEEP = 0.03
"""Seconds in which a host tells of a step of so many blocks."""


def _job(block: Callable[[], nn.Module], shape: tuple[int, ...], batch: int) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(block() for _ in range(BLOCKS))),
        loss=lambda output, target: (output.float() - target).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: [(torch.zeros(shape), torch.zeros(shape))] * 4,
        batch_size=batch,
    )


def measure_starts(device: torch.device) -> dict[str, float]:
    """What the host takes to start an operator (`Device.start`), with all that is around: modules, views, autograd."""
    # large enough to run the kernels that large models run, and small enough that the GPU waits for its host
    job = _job(partial(Attention, 512, 8), (512, 512), 2)
    profile = trace(job, precision=PRECISION, device="cuda")
    count = {p: sum(op.count for x in profile.each() for op in x.ops if op.phase == p) for p in ("forward", "backward")}
    inside = sum(op.count for x in profile.each() for op in x.ops if op.phase == "forward" and x.composite)
    plain = _passes(job, device, 25)
    watched = _passes(job, device, 15, lambda model: recompute_selectively(model, "cuda"))
    more = watched.forward + watched.backward - plain.forward - plain.backward
    return {
        "forward": plain.forward / count["forward"],
        "backward": plain.backward / count["backward"],
        "update": plain.update / profile.tensors,
        "watched": max(0.0, more) / (2 * max(1, inside)),
    }


def measure_amid(alone: Device, device: torch.device) -> dict[str, float]:
    """By what factor a GPU takes longer for the kernels of large steps than for each alone: `compute` and `conv`.

    The GPU sleeps until the host has told it of the whole step, so that its own time is seen.
    """
    found: dict[str, float] = {}
    for name, job in (
        ("compute", _job(partial(Attention, 1024, 16), (1024, 1024), 8)),
        ("conv", _job(partial(Residual, 128), (128, 56, 56), 64)),
    ):
        profile = trace(job, precision=PRECISION, device="cuda")
        pricer = Pricer(profile, replace(alone, situ={}), PRECISION)
        told = [pricer.told(x, phase, job.batch_size) for x in profile.each() for phase in ("forward", "backward")]
        found[name] = _at_least_one(_device_seconds(job, device) / sum(t.busy for t in told))
    return found


def _at_least_one(factor: float) -> float:
    """A step that is faster than its kernels alone was measured wrongly, or its data was in a cache."""
    return min(100.0, max(1.0, factor))


@dataclass(frozen=True, slots=True)
class _Seconds:
    """What the host takes for the parts of a small step."""

    forward: float
    backward: float
    update: float


def _passes(
    job: Job, device: torch.device, steps: int, prepare: Callable[[nn.Module], object] = lambda model: None
) -> _Seconds:
    """Medians over some steps; before each part the GPU has done what it was told."""
    model = job.model().to(device)
    prepare(model)
    optimizer = prefer_fused(job.optimizer(model.parameters()))
    x = _input(job, device)
    found = []
    for _ in range(steps + 3):
        times = [_settled(device)]
        loss = _loss(job, model, x)
        times.append(_settled(device))
        loss.backward()
        times.append(_settled(device))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        found.append([b - a for a, b in itertools.pairwise(times)])
    return _Seconds(*(statistics.median(column) for column in zip(*found[3:], strict=True)))


def _device_seconds(job: Job, device: torch.device) -> float:
    """What the GPU takes for forward and backward when it need not wait for its host."""
    model = job.model().to(device)
    x = _input(job, device)

    def step() -> None:
        _loss(job, model, x).backward()
        model.zero_grad()

    for _ in range(3):
        step()
    return statistics.median(clock_ahead(step, SLEEP) for _ in range(7))


def _loss(job: Job, model: nn.Module, x: torch.Tensor) -> Any:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return job.loss(model(x), x)


def _input(job: Job, device: torch.device) -> torch.Tensor:
    return torch.randn(job.batch_size, *job.data()[0][0].shape, device=device)


def _settled(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()
