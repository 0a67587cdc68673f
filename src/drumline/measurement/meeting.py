"""Ranks that meet: what replicating, sharding and small messages add to a step, beyond what messages take alone."""

from __future__ import annotations

import functools
import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .blocks import Attention, steps_of
from .clock import settle

BATCH, HEADS, SHAPE, BLOCKS = 8, 4, (96, 256), 2
"""Blocks of some milliseconds: in shorter ones ranks do not get far apart."""
TIMES = 3
"""Steps of each kind in a row."""


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


class Meetings:
    """Small steps of a group, by how its ranks meet, taken in several places of a measurement. All ranks of it call.

    A machine that others use is now faster and now slower: only steps that follow each other can be compared.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group
        self._job = steps_of(functools.partial(Attention, SHAPE[-1], HEADS), SHAPE, BATCH, BLOCKS)
        plain, copied, sharded = (self._job.model().to(device) for _ in range(3))
        replicated = DistributedDataParallel(copied, process_group=group, gradient_as_bucket_view=True)
        mesh = DeviceMesh.from_group(group, device.type)
        for block in sharded.children():
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for block in plain.children():
            block.register_forward_hook(self._meet)
        self._models = {"apart": plain, "after": plain, "amid": plain, "replicated": replicated, "sharded": sharded}
        self._x = torch.randn(BATCH, *SHAPE, device=device)
        self._flag = torch.zeros(64, device=device)
        self._amid = False
        self._times: dict[str, list[float]] = {how: [] for how in self._models}
        self._numbers = sum(p.numel() for p in next(plain.children()).parameters())
        for how in self._models:
            self._step(how)  # the first one makes what the others find

    def take(self) -> None:
        """Steps of each kind: apart, with a small message at the end, or in each block, replicated, sharded."""
        for how, times in self._times.items():
            times.append(statistics.median(self._step(how) for _ in range(TIMES)))

    def _step(self, how: str) -> float:
        self._amid = how == "amid"
        start = time.perf_counter()
        self._job.loss(self._models[how](self._x), self._x).backward()
        settle(self._device.type)
        if how != "apart":
            self._agree()
        return time.perf_counter() - start

    def _meet(self, *_: object) -> None:
        if self._amid:
            dist.all_reduce(self._flag, group=self._group)

    def _agree(self) -> None:
        dist.all_reduce(self._flag, group=self._group)
        settle(self._device.type)

    def waiting(self, among: dist.ProcessGroup | None = None) -> Waiting:
        """What was found: the mean of all ranks that took steps; `among` are those, if not all."""
        apart = math.exp(statistics.fmean(map(math.log, self._times["apart"])))
        after, amid, copies, split = (apart * self._slower(how) for how in ("after", "amid", "replicated", "sharded"))
        values = [apart, copies, (amid - after) / BLOCKS, (split - after) / BLOCKS]
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, group=among)
        apart, copies, stall, unit = (found / dist.get_world_size(among)).tolist()
        return Waiting(apart, copies, max(1e-6, stall), max(0.0, unit), BLOCKS, 4.0 * self._numbers)

    def _slower(self, how: str) -> float:
        """How much longer than apart, each time it was taken."""
        return statistics.median(a / b for a, b in zip(self._times[how], self._times["apart"], strict=True))
