"""Kernels in their place: a training step takes longer than its kernels measured alone, because caches are cold, memory
is fresh and every operator passes through autograd and Python. Two small steps of a known kind tell by how much.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..cluster import Device
from ..cost.work import Pricer
from ..job import Job
from ..trace import trace
from ..trace.fused import prefer_fused
from .clock import settle
from .pulse import speed

STEPS = 7
BATCH = 8


class _Attention(nn.Module):
    """A transformer block of width 128."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, 4, 32).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, 128)
        x = x + self.out(y)
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class _Convolution(nn.Module):
    """A residual block of 32 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def _job(block: Callable[[], nn.Module], shape: tuple[int, ...]) -> Job:
    return Job(
        model=lambda: nn.Sequential(*(nn.Sequential(block()) for _ in range(3))),
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: [(torch.zeros(shape), torch.zeros(shape))] * 4,
        batch_size=BATCH,
    )


def measure_situ(alone: Device, device: torch.device) -> dict[str, float]:
    """By what factor a real step is slower than its kernels alone: `compute`, `conv` and `update`."""
    found: dict[str, float] = {}
    updates = []
    for name, job, shape in (
        ("compute", _job(_Attention, (64, 128)), (64, 128)),
        ("conv", _job(_Convolution, (32, 16, 16)), (32, 16, 16)),
    ):
        passes, update = _step_seconds(job, shape, device)
        now = speed(alone, device, rounds=8)
        again, update_again = _step_seconds(job, shape, device)
        profile = trace(job)
        pricer = Pricer(profile, alone, "fp32")
        layers = list(profile.each())
        kernels = sum(pricer.layer_seconds(x, phase, BATCH) for x in layers for phase in ("forward", "backward"))
        moved = sum(pricer.update_seconds(x, profile.optimizer_bytes, profile.optimizer_ops, 1.0) for x in layers)
        found[name] = max(1.0, now * (passes + again) / 2 / kernels)
        updates.append(max(1.0, now * (update + update_again) / 2 / moved))
    found["update"] = statistics.mean(updates)
    return found


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
    shape = (64, 128)
    job = _job(_Attention, shape)
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
    for i in range(12 * STEPS):
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


def _step_seconds(job: Job, shape: tuple[int, ...], device: torch.device) -> tuple[float, float]:
    """Median seconds of forward and backward, and of the update."""
    model = job.model().to(device)
    optimizer = prefer_fused(job.optimizer(model.parameters()))
    x = torch.randn(BATCH, *shape, device=device)
    passes, updates = [], []
    for _ in range(STEPS + 2):
        start = time.perf_counter()
        job.loss(model(x), x).backward()
        settle(device.type)
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        settle(device.type)
        passes.append(middle - start)
        updates.append(time.perf_counter() - middle)
    return statistics.median(passes[2:]), statistics.median(updates[2:])
