"""Large steps on a GPU, which the device bounds: how much slower kernels are amid others than alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..clusters import DeviceSpec
from ..core.job import Job
from ..costs.work import Pricer
from ..tracing import trace
from .blocks import Attention, Residual, steps_of

PRECISION = "bf16"
BLOCKS = 4
WARM, LONG = 0.8, 0.5
"""Seconds of large steps without a pause, before those that are timed and of them. Within tenths of a second a GPU that
works without one gets warm and slows its clock, as it will in a run; kernels that are timed alone never get there."""


def measure_amid(alone: DeviceSpec, device: torch.device) -> dict[str, float]:
    """By what factor a GPU takes longer for the kernels of large steps than for each alone: `compute` and `conv`.

    The steps are so large that the host is always ahead, so that the GPU's own time is seen.
    """
    found: dict[str, float] = {}
    for name, job in (
        ("compute", steps_of(partial(Attention, 1024, 16), (1024, 1024), 32, BLOCKS)),
        ("conv", steps_of(partial(Residual, 128), (128, 56, 56), 256, BLOCKS)),
    ):
        profile = trace(job, precision=PRECISION, device="cuda")
        pricer = Pricer(profile, replace(alone, in_step_slowdown={}), PRECISION)
        told = [pricer.told(x, phase, job.batch_size) for x in profile.each() for phase in ("forward", "backward")]
        found[name] = _at_least_one(_device_seconds(job, device) / sum(t.busy for t in told))
    return found


def _at_least_one(factor: float) -> float:
    """A step that is faster than its kernels alone was measured wrongly, or its data was in a cache."""
    return min(100.0, max(1.0, factor))


def _device_seconds(job: Job, device: torch.device) -> float:
    """What the GPU takes for forward and backward when it need not wait for its host."""
    model = job.model().to(device)
    x = torch.randn(job.batch_size, *job.data()[0][0].shape, device=device)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss: Any = job.loss(model(x), x)
        loss.backward()
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
