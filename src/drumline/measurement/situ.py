"""Kernels in their place: a training step takes longer than its kernels measured alone, because caches are cold, memory
is fresh and every operator passes through autograd and Python. Small steps of known kinds tell by how much.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..clusters import DeviceSpec
from ..core.job import Job
from ..costs.work import EACH, Pricer, entered
from ..models import Profile
from ..tracing import trace
from ..tracing.fused import prefer_fused
from .blocks import Attention, Residual
from .shared import own_clock

LEAST = 0.5
"""The least that a step can be of its kernels alone, which are timed amid more other work than some steps have."""
BATCH, HEADS = 8, 4
WAYS = ("forward", "backward")


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
    """By kind. Of several shapes, so that what is wrong about the price of one of them is not taken for its place; and
    convolutions of tensors of megabytes, as those of real nets, which a core's own cache does not hold.
    """
    return {
        LIGHT: [_job(functools.partial(Attention, 64, HEADS), (32, 64), 4)],
        COMPUTE: [
            _job(functools.partial(Attention, width, HEADS), (length, width), 1)
            for width, length in ((128, 96), (256, 64), (384, 48))
        ],
        CONV: [
            _job(functools.partial(Residual, channels), (channels, side, side), 1)
            for channels, side in ((32, 64), (64, 32))
        ],
    }


@dataclass(frozen=True, slots=True)
class Situ:
    """What a step takes beyond its kernels."""

    factors: dict[str, float]
    """`Device.situ`."""
    start: dict[str, float]
    """`Device.start`: seconds for each tensor that is updated, and for each operator beside its kernel."""


class Steps:
    """Small steps on a CPU rank, taken again and again amid a measurement, as its kernels are: a machine that others
    use is now faster and now slower, and what is compared must have seen the same of it.
    """

    def __init__(self, crowd: float) -> None:
        self._now = own_clock(crowd)
        self._steps = {kind: [_Step(job) for job in jobs] for kind, jobs in _jobs().items()}
        self.seconds(self._now)

    def take(self) -> None:
        """One step of each kind, which is counted."""
        for step in self._all():
            step.times.append(step(self._now))

    def seconds(self, now: Callable[[], float]) -> list[float]:
        """What each takes by a clock."""
        return [sum(step(now)) for step in self._all()]

    def beside(self, alone: DeviceSpec) -> Situ:
        """What was found, beside what the kernels take alone.

        What light steps take beyond their kernels is put down to the number of their operators, and of their tensors in
        the update; what the others take beyond that is a factor: `compute` and `conv`, each way. How much longer an
        update takes is told by two that have as many tensors, of different sizes: `update`.
        """
        alone = replace(alone, host_overhead={"update": 0.0}, in_step_slowdown={})
        priced = {kind: [_Priced(step, alone) for step in steps] for kind, steps in self._steps.items()}
        (light,), (least, *_, most) = priced[LIGHT], priced[COMPUTE]
        found = {"update": max(1.0, (most.took[2] - least.took[2]) / (most.moved - least.moved))}
        start = {"update": max(0.0, light.took[2] - found["update"] * light.moved) / light.profile.tensors}
        for i, way in enumerate(WAYS):
            start[EACH[way]] = max(0.0, light.took[i] - light.kernels[i]) / light.operators[i]
        for kind, (i, way) in itertools.product((CONV, COMPUTE), enumerate(WAYS)):
            beyond = [p.took[i] - p.operators[i] * start[EACH[way]] for p in priced[kind]]
            found[f"{kind}_{way}"] = max(LEAST, sum(beyond) / sum(p.kernels[i] for p in priced[kind]))
        return Situ(found, start)

    def _all(self) -> list[_Step]:
        return [step for steps in self._steps.values() for step in steps]


class _Step:
    """One of them: seconds of forward, backward and update."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.times: list[tuple[float, float, float]] = []
        self._model = job.model()
        self._optimizer = prefer_fused(job.optimizer(self._model.parameters()))
        self._x = torch.randn(BATCH, *job.data()[0][0].shape)

    def __call__(self, now: Callable[[], float]) -> tuple[float, float, float]:
        """After one that is not counted: it finds the caches as it leaves them itself."""
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
    """What a step took, as the mean of the logarithms, beside what its kernels take alone."""

    def __init__(self, step: _Step, alone: DeviceSpec) -> None:
        self.took = [math.exp(statistics.fmean(map(math.log, column))) for column in zip(*step.times, strict=True)]
        self.profile: Profile = trace(step.job)
        pricer, layers = Pricer(self.profile, alone, "fp32"), list(self.profile.each())
        self.kernels = [sum(pricer.layer_seconds(x, way, BATCH) for x in layers) for way in WAYS]
        self.operators = [sum(entered(op) for x in layers for op in x.ops if op.phase == way) for way in WAYS]
        self.moved = sum(
            pricer.update_seconds(x, self.profile.optimizer_bytes, self.profile.optimizer_ops, 1.0) for x in layers
        )
