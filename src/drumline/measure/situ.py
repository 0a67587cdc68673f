"""Kernels in their place: a training step takes longer than its kernels measured alone, because caches are cold, memory
is fresh and every operator passes through autograd and Python. Two small steps of a known kind tell by how much.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..cluster import Device
from ..cost.work import Pricer
from ..job import Job
from ..trace import trace
from ..trace.fused import prefer_fused
from .blocks import Attention, Residual
from .clock import settle
from .pace import SIZES, Look, Pace
from .pulse import OWN
from .shared import own_clock

STEPS, FEW, LEAST = 12, 9, 0.5
"""How often each step is repeated; and the least that a step can be of its kernels alone, which are timed amid more
other work than some steps have."""
BATCH, HEADS = 8, 4


def _job(block: Callable[[], nn.Module], shape: tuple[int, ...], blocks: int = 3) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(nn.Sequential(block()) for _ in range(blocks))),
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: [(torch.zeros(shape), torch.zeros(shape))] * 4,
        batch_size=BATCH,
    )


@dataclass(frozen=True, slots=True)
class Situ:
    """What a step takes beyond its kernels."""

    factors: dict[str, float]
    """`Device.situ`."""
    update: float
    """Seconds for each tensor that is updated."""


def measure_situ(alone: Device, device: torch.device, crowd: float) -> Situ:
    """By what factor a real step is slower than its kernels alone: `compute` and `conv`, each way, and `update`.

    What a forward writes is memory that nobody has touched before, so that it differs from a backward. An update takes
    some seconds for each tensor, which the step with the smaller ones tells, and is slower than its kernels in a loop.
    """
    found: dict[str, float] = {}
    pace = Pace(Look(device, crowded=crowd > 1), {k: size / _rate(alone, k) for k, size in SIZES.items()})
    updates: list[tuple[float, float, int]] = []
    for name, job, shape in (
        ("conv", _job(functools.partial(Residual, 64), (64, 24, 24), 2), (64, 24, 24)),
        ("compute", _job(functools.partial(Attention, 256, HEADS), (128, 256), 2), (128, 256)),
    ):
        took = _step_seconds(job, shape, device, own_clock(crowd), pace)
        profile = trace(job)
        pricer = Pricer(profile, replace(alone, start={"update": 0.0}), "fp32")
        layers = list(profile.each())
        for phase, seconds in zip(("forward", "backward"), took, strict=False):
            expected = sum(pricer.layer_seconds(x, phase, BATCH) for x in layers)
            found[f"{name}_{phase}"] = max(LEAST, seconds / expected)
        moved = sum(pricer.update_seconds(x, profile.optimizer_bytes, profile.optimizer_ops, 1.0) for x in layers)
        updates.append((took[2], moved, profile.tensors))
    (small, little, few), (large, much, many) = updates
    each = max(0.0, small - little) / few
    found["update"] = max(1.0, (large - many * each) / much)
    return Situ(found, each)


def _rate(alone: Device, kernel: str) -> float:
    """At which a look was measured."""
    curve = alone.curve_of(OWN[kernel], "fp32")
    assert curve is not None
    return curve.at(SIZES[kernel])


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds of a small step of equal blocks, by how its ranks meet."""

    apart: float
    """They do not."""
    replicated: float
    """Replicas that sum their gradients."""
    stall: float
    """What one small message amid the step adds."""
    unit: float
    """What sharding one block adds, its messages included."""
    blocks: int
    block_bytes: float
    """Parameters of one block."""


def measure_waiting(device: torch.device, group: dist.ProcessGroup) -> Waiting:
    """Steps of a group in turns: apart, with a small message at the end, or in each block, replicated, sharded."""
    shape = (96, 256)  # blocks of some milliseconds: in shorter ones ranks do not get far apart
    job = _job(functools.partial(Attention, 256, HEADS), shape, 2)
    plain, sharded = job.model().to(device), job.model().to(device)
    replicated = DistributedDataParallel(job.model().to(device), process_group=group, gradient_as_bucket_view=True)
    mesh = DeviceMesh.from_group(group, device.type)
    for block in sharded.children():
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(BATCH, *shape, device=device)
    flag = torch.zeros(64, device=device)
    amid = False

    def meet(*_: object) -> None:
        if amid:
            dist.all_reduce(flag, group=group)

    blocks = [block.register_forward_hook(meet) for block in plain.children()]
    models = {"apart": plain, "after": plain, "amid": plain, "replicated": replicated, "sharded": sharded}
    times: dict[str, list[float]] = {how: [] for how in models}
    for i in range(STEPS * len(models)):
        how = tuple(models)[i // 4 % len(models)]
        amid = how == "amid"
        start = time.perf_counter()
        job.loss(models[how](x), x).backward()
        settle(device.type)
        if how != "apart":
            dist.all_reduce(flag, group=group)
            settle(device.type)
        times[how].append(time.perf_counter() - start)
    apart, after, among, copies, split = (statistics.median(t) for t in times.values())
    n = len(blocks)
    found = torch.tensor([apart, copies, (among - after) / n, (split - after) / n], dtype=torch.float64, device=device)
    dist.all_reduce(found)
    apart, copies, stall, unit = (found / dist.get_world_size()).tolist()
    numbers = sum(p.numel() for p in next(plain.children()).parameters())
    return Waiting(apart, copies, max(1e-6, stall), max(0.0, unit), n, 4.0 * numbers)


def _step_seconds(
    job: Job, shape: tuple[int, ...], device: torch.device, now: Callable[[], float], pace: Pace
) -> tuple[float, float, float]:
    """Median seconds of forward, backward and update, at the pace that the kernels were measured at."""
    model = job.model().to(device)
    optimizer = prefer_fused(job.optimizer(model.parameters()))
    x = torch.randn(BATCH, *shape, device=device)
    found = []
    for _ in range(FEW + 2):
        times = [now()]
        loss = job.loss(model(x), x)
        times.append(now())
        loss.backward()
        times.append(now())
        optimizer.step()
        optimizer.zero_grad()
        times.append(now())
        pace.look()
        found.append([(b - a) / pace.of_a_step() for a, b in itertools.pairwise(times)])
    forward, backward, update = (statistics.median(column) for column in zip(*found[2:], strict=True))
    return forward, backward, update
