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
from ..cost.work import CAST, Pricer
from ..job import Job
from ..runtime.memory.recompute import recompute
from ..runtime.memory.selective import recompute_selectively
from ..trace import trace
from ..trace.fused import prefer_fused
from .blocks import Attention, Residual
from .shapes import computing_in

PRECISION = "bf16"
BLOCKS, LAYERS, STEPS = 4, 12, 12
"""Blocks of large steps and of small ones, and how many small ones are taken."""
WARM, LONG = 0.8, 0.5
"""Seconds of large steps without a pause, before those that are timed and of them. Within tenths of a second a GPU that
works without one gets warm and slows its clock, as it will in a run; kernels that are timed alone never get there."""


def _job(block: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, blocks: int = BLOCKS) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(block() for _ in range(blocks))),
        loss=lambda output, target: (output.float() - target).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: [(torch.zeros(shape), torch.zeros(shape))] * 4,
        batch_size=batch,
    )


def measure_starts(device: torch.device) -> dict[str, float]:
    """What the host takes to start an operator (`Device.start`), with all that is around: modules, views, autograd.

    In a model of many blocks, because what a host has just done once more it does faster than what it does next. With
    autocast and without it, which tells what a cast costs; recomputed fully and selectively, which cost more.
    """
    # large enough to run the kernels that large models run, and small enough that the GPU waits for its host
    job = _job(partial(Attention, 512, 8), (512, 512), 2, LAYERS)
    profile = trace(job, precision="tf32", device="cuda")
    ways = ("forward", "backward")
    count = {way: sum(op.count for x in profile.each() for op in x.ops if op.phase == way) for way in ways}
    inside = sum(op.count for x in profile.each() for op in x.ops if op.phase == "forward" and x.composite)
    half = trace(job, precision=PRECISION, device="cuda")
    casts = sum(op.count for x in half.each() for op in x.ops if op.name == CAST)
    with computing_in("tf32"):
        plain = _passes(job, device)
        cast = _passes(job, device, half=True)
        full = _passes(job, device, recompute)
        watched = _passes(job, device, lambda model: recompute_selectively(model, "cuda"))
    again = max(0.0, full.both - plain.both - plain.forward)
    return {
        "forward": plain.forward / count["forward"],
        "backward": plain.backward / count["backward"],
        "cast": max(0.0, cast.both - plain.both) / max(1, casts),
        "update": plain.update / profile.tensors,
        "again": again / (2 * LAYERS),
        "watched": max(0.0, watched.both - plain.both - again) / (2 * max(1, inside)),
    }


def measure_amid(alone: Device, device: torch.device) -> dict[str, float]:
    """By what factor a GPU takes longer for the kernels of large steps than for each alone: `compute` and `conv`.

    The steps are so large that the host is always ahead, so that the GPU's own time is seen.
    """
    found: dict[str, float] = {}
    for name, job in (
        ("compute", _job(partial(Attention, 1024, 16), (1024, 1024), 32)),
        ("conv", _job(partial(Residual, 128), (128, 56, 56), 256)),
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

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def _passes(
    job: Job, device: torch.device, prepare: Callable[[nn.Module], object] = lambda model: None, *, half: bool = False
) -> _Seconds:
    """Medians over some steps; before each part the GPU has done what it was told."""
    model = job.model().to(device)
    prepare(model)
    optimizer = prefer_fused(job.optimizer(model.parameters()))
    x = _input(job, device)
    found = []
    for _ in range(STEPS + 3):
        times = [_settled(device)]
        loss = _loss(job, model, x, half=half)
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

    for _ in range(2):
        step()
    once = _stretch(step, 3)
    _stretch(step, 1 + int(WARM / once))
    return _stretch(step, 1 + int(LONG / once))


def _stretch(step: Callable[[], None], times: int) -> float:
    """Seconds of one of so many steps without a pause."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / times


def _loss(job: Job, model: nn.Module, x: torch.Tensor, *, half: bool = True) -> Any:
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        return job.loss(model(x), x)


def _input(job: Job, device: torch.device) -> torch.Tensor:
    return torch.randn(job.batch_size, *job.data()[0][0].shape, device=device)


def _settled(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()
