"""Slowdown of kernels inside a training step, where caches are cold and operators pass through Python and autograd."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..clusters import DeviceSpec
from ..core.job import Job
from ..costs.kernel_time import OPERATOR_OVERHEAD, Pricer, loop_calls
from ..models import Profile
from ..tracing import trace
from ..tracing.optimizer import prefer_fused
from .cpu_clock import rank_clock


class AttentionBlock(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, width)
        x = x + self.out(y)
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm, and a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class RecurrentBlock(nn.Module):
    """An LSTM of some layers, batch first."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)[0]
        return out


def block_job(block: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, blocks: int) -> Job:
    """A job of some blocks in sequence that learns the identity."""
    return Job(
        model=lambda: nn.Sequential(*(block() for _ in range(blocks))),
        loss=lambda output, target: (output.float() - target).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: [(torch.zeros(shape), torch.zeros(shape))] * 4,
        batch_size=batch,
    )


MIN_SLOWDOWN = 0.5
"""Smallest slowdown of a step: kernels are timed with colder caches than some steps have."""
BATCH, HEADS = 8, 4
PHASES = ("forward", "backward")


def _job(block: Callable[[], nn.Module], shape: tuple[int, ...], blocks: int = 3) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(nn.Sequential(block()) for _ in range(blocks))),
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: [(torch.zeros(shape), torch.zeros(shape))] * 4,
        batch_size=BATCH,
    )


LIGHT, COMPUTE, CONV = "light", "compute", "conv"


def _jobs() -> dict[str, list[Job]]:
    """Jobs by kind, of several shapes, so that a pricing error of one shape is not taken for slowdown. Convolutions
    work on megabytes, as in real networks, which do not fit in a core's own cache.
    """
    return {
        LIGHT: [_job(functools.partial(AttentionBlock, 64, HEADS), (32, 64), 4)],
        COMPUTE: [
            _job(functools.partial(AttentionBlock, width, HEADS), (length, width), 1)
            for width, length in ((128, 96), (256, 64), (384, 48))
        ],
        CONV: [
            _job(functools.partial(ResidualBlock, channels), (channels, side, side), 1)
            for channels, side in ((32, 64), (64, 32))
        ],
    }


@dataclass(frozen=True, slots=True)
class StepOverhead:
    """Time of a step beyond its kernels."""

    slowdown: dict[str, float]
    """`DeviceSpec.in_step_slowdown`."""
    host_overhead: dict[str, float]
    """`DeviceSpec.host_overhead`: seconds per updated tensor, and per operator beyond its kernel."""


class SmallSteps:
    """Small steps on a CPU rank, taken throughout the measurement of its kernels: the speed of a shared machine varies,
    and only timings taken together are comparable.
    """

    def __init__(self, threads_per_core: float) -> None:
        self._now = rank_clock(threads_per_core)
        self._steps = {kind: [_Step(job) for job in jobs] for kind, jobs in _jobs().items()}
        self.seconds(self._now)

    def take(self) -> None:
        """Take and record one step of each kind."""
        for step in self._all():
            step.times.append(step(self._now))

    def seconds(self, now: Callable[[], float]) -> list[float]:
        """Seconds of each step by a clock."""
        return [sum(step(now)) for step in self._all()]

    def compare(self, alone: DeviceSpec) -> StepOverhead:
        """The overhead relative to the kernels alone.

        Time of light steps beyond their kernels is attributed to their operators, and in the update to their tensors.
        Time of the other steps beyond that is a factor: `compute` and `conv`, per phase. Two updates with equally many
        tensors of different sizes give the factor `update`.
        """
        alone = replace(alone, host_overhead={"update": 0.0}, in_step_slowdown={})
        priced = {kind: [_Priced(step, alone) for step in steps] for kind, steps in self._steps.items()}
        (light,), (least, *_, most) = priced[LIGHT], priced[COMPUTE]
        slowdown = {"update": max(1.0, (most.took[2] - least.took[2]) / (most.moved - least.moved))}
        overhead = {"update": max(0.0, light.took[2] - slowdown["update"] * light.moved) / light.profile.tensors}
        for i, phase in enumerate(PHASES):
            overhead[OPERATOR_OVERHEAD[phase]] = max(0.0, light.took[i] - light.kernels[i]) / light.operators[i]
        for kind, (i, phase) in itertools.product((CONV, COMPUTE), enumerate(PHASES)):
            beyond = [p.took[i] - p.operators[i] * overhead[OPERATOR_OVERHEAD[phase]] for p in priced[kind]]
            slowdown[f"{kind}_{phase}"] = max(MIN_SLOWDOWN, sum(beyond) / sum(p.kernels[i] for p in priced[kind]))
        return StepOverhead(slowdown, overhead)

    def _all(self) -> list[_Step]:
        return [step for steps in self._steps.values() for step in steps]


class _Step:
    """One small step: seconds of forward, backward and update."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.times: list[tuple[float, float, float]] = []
        self._model = job.model()
        self._optimizer = prefer_fused(job.optimizer(self._model.parameters()))
        self._x = torch.randn(BATCH, *job.data()[0][0].shape)

    def __call__(self, now: Callable[[], float]) -> tuple[float, float, float]:
        """Time the second of two steps, which starts with the caches as a step leaves them."""
        self._once(now)
        return self._once(now)

    def _once(self, now: Callable[[], float]) -> tuple[float, float, float]:
        times = [now()]
        loss = self.job.loss(self._model(self._x), self._x)
        times.append(now())
        loss.backward()
        times.append(now())
        self._optimizer.step()
        self._optimizer.zero_grad()
        times.append(now())
        forward, backward, update = (b - a for a, b in itertools.pairwise(times))
        return forward, backward, update


class _Priced:
    """Measured time of a step (geometric mean) and the price of its kernels alone."""

    def __init__(self, step: _Step, alone: DeviceSpec) -> None:
        self.took = [math.exp(statistics.fmean(map(math.log, column))) for column in zip(*step.times, strict=True)]
        self.profile: Profile = trace(step.job)
        pricer, layers = Pricer(self.profile, alone, "fp32"), list(self.profile.each())
        self.kernels = [sum(pricer.layer_seconds(x, phase, BATCH) for x in layers) for phase in PHASES]
        self.operators = [sum(loop_calls(op) for x in layers for op in x.ops if op.phase == phase) for phase in PHASES]
        self.moved = sum(
            pricer.update_seconds(x, self.profile.optimizer_bytes, self.profile.optimizer_ops, 1.0) for x in layers
        )


PRECISION = "bf16"
BLOCKS = 4
WARM_UP_S, TIMED_S = 0.8, 0.5
"""Seconds of large steps without a pause, before the timed ones and of the timed ones. Within tenths of a second a busy
GPU gets warm and slows its clock, as in a run; kernels timed alone never do."""


def measure_gpu_slowdown(alone: DeviceSpec, device: torch.device) -> dict[str, float]:
    """Factor by which kernels of large steps are slower on a GPU than alone: `compute` and `conv`.

    The steps are so large that the GPU never waits for its host.
    """
    factors: dict[str, float] = {}
    for name, job in (
        ("compute", block_job(partial(AttentionBlock, 1024, 16), (1024, 1024), 32, BLOCKS)),
        ("conv", block_job(partial(ResidualBlock, 128), (128, 56, 56), 256, BLOCKS)),
    ):
        profile = trace(job, precision=PRECISION, device="cuda")
        pricer = Pricer(profile, replace(alone, in_step_slowdown={}), PRECISION)
        times = [
            pricer.layer_time(x, phase, job.batch_size) for x in profile.each() for phase in ("forward", "backward")
        ]
        factors[name] = _at_least_one(_device_seconds(job, device) / sum(t.kernel for t in times))
    return factors


def _at_least_one(factor: float) -> float:
    """Exclude measurement errors: a step is not faster than its kernels alone, unless its data was in a cache."""
    return min(100.0, max(1.0, factor))


def _device_seconds(job: Job, device: torch.device) -> float:
    """GPU seconds of forward and backward without waiting for the host."""
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
    _stretch(step, 1 + int(WARM_UP_S / once))
    return _stretch(step, 1 + int(TIMED_S / once))


def _stretch(step: Callable[[], None], times: int) -> float:
    """Seconds of one of `times` steps without a pause."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / times
