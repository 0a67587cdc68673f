"""Cost of synchronisation: time that replication, sharding and small messages add to a step, with all ranks or some."""

from __future__ import annotations

import functools
import math
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .cpu_clock import rank_clock
from .in_step_slowdown import AttentionBlock, SmallSteps, block_job
from .links import HostGroups, measure_collectives
from .timing import synchronize

BATCH, HEADS, SHAPE, BLOCKS = 8, 4, (96, 256), 2
"""Blocks of some milliseconds: in shorter ones ranks hardly drift."""
TIMES = 3
"""Steps of each kind in a row."""


@dataclass(frozen=True, slots=True)
class SynchronisationCost:
    """Seconds of a small step of equal blocks, by kind of synchronisation."""

    independent: float
    """No synchronisation."""
    replicated: float
    """Replicas that all-reduce their gradients."""
    mid_step_message: float
    """Added by one small message in the middle of a step."""
    sharded_unit: float
    """Added by sharding one block, including its messages."""
    blocks: int
    block_bytes: float
    """Parameters of one block."""


class SynchronisedSteps:
    """Small steps of a group with different kinds of synchronisation, taken in turns throughout a measurement.

    All ranks of the group call it. The speed of a shared machine varies, so only steps of one turn are compared.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group
        self._job = block_job(functools.partial(AttentionBlock, SHAPE[-1], HEADS), SHAPE, BATCH, BLOCKS)
        plain, copied, sharded = (self._job.model().to(device) for _ in range(3))
        replicated = DistributedDataParallel(copied, process_group=group, gradient_as_bucket_view=True)
        mesh = DeviceMesh.from_group(group, device.type)
        for block in sharded.children():
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for block in plain.children():
            block.register_forward_hook(self._send_in_block)
        self._models = {
            "independent": plain,
            "after": plain,
            "in_blocks": plain,
            "replicated": replicated,
            "sharded": sharded,
        }
        self._x = torch.randn(BATCH, *SHAPE, device=device)
        self._flag = torch.zeros(64, device=device)
        self._in_blocks = False
        self._times: dict[str, list[float]] = {how: [] for how in self._models}
        self._numbers = sum(p.numel() for p in next(plain.children()).parameters())
        for how in self._models:
            self._step(how)  # the first step allocates

    def take(self) -> None:
        """Take a turn: independent, with a small message at the end or in each block, replicated, sharded."""
        for how, times in self._times.items():
            times.append(statistics.median(self._step(how) for _ in range(TIMES)))

    def _step(self, how: str) -> float:
        self._in_blocks = how == "in_blocks"
        start = time.perf_counter()
        self._job.loss(self._models[how](self._x), self._x).backward()
        synchronize(self._device.type)
        if how != "independent":
            self._send()
        return time.perf_counter() - start

    def _send_in_block(self, *_: object) -> None:
        if self._in_blocks:
            dist.all_reduce(self._flag, group=self._group)

    def _send(self) -> None:
        dist.all_reduce(self._flag, group=self._group)
        synchronize(self._device.type)

    def cost(self, among: dist.ProcessGroup | None = None) -> SynchronisationCost:
        """The mean over all ranks that took steps; `among` is their group, if not all ranks."""
        base = math.exp(statistics.fmean(map(math.log, self._times["independent"])))
        kinds = ("after", "in_blocks", "replicated", "sharded")
        after, in_blocks, replicated, sharded = (base * self._slowdown(how) for how in kinds)
        values = [base, replicated, (in_blocks - after) / BLOCKS, (sharded - after) / BLOCKS]
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=among)
        base, replicated, message, unit = (total / dist.get_world_size(among)).tolist()
        return SynchronisationCost(base, replicated, max(1e-6, message), max(0.0, unit), BLOCKS, 4.0 * self._numbers)

    def _slowdown(self, how: str) -> float:
        """Time relative to the independent step of the same turn."""
        return statistics.median(a / b for a, b in zip(self._times[how], self._times["independent"], strict=True))


ROUNDS, TURNS = 2, 3
"""Rounds over the numbers of active ranks; turns of synchronised steps for each."""


@dataclass(slots=True)
class ActiveRanks:
    """Measurements with only some ranks of a host active."""

    compute_factor: float
    """Compute time of a rank, relative to all ranks being active."""
    synchronisation: SynchronisationCost | None = None
    """None if not measured."""
    collectives: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def measure_partial_occupancy(groups: HostGroups, steps: SmallSteps, threads_per_core: float) -> dict[int, ActiveRanks]:
    """Measurements by the number of active ranks of a host. All ranks call it.

    Synchronisation is measured only if ranks share cores, where idle ranks make it faster.
    """
    counts = [k for k in (2**i for i in range(16)) if k < groups.per_host] + [groups.per_host]
    measured = {
        k: ActiveRanks(factor) for k, factor in _compute_factors(groups, counts, steps, threads_per_core).items()
    }
    most = torch.tensor([threads_per_core], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)  # quotas may differ between ranks, but all must take part
    for count in counts[:-1]:
        if count > 1 and most.item() > 1:
            _measure_synchronisation(groups, count, measured[count])
    return measured


def _compute_factors(
    groups: HostGroups, counts: list[int], steps: SmallSteps, threads_per_core: float
) -> dict[int, float]:
    """Compute factor by number of active ranks, from small steps taken in turns."""
    group, n, rank = groups.inside, groups.per_host, dist.get_rank(groups.inside)
    took = torch.zeros(len(counts), dtype=torch.float64)
    for _ in range(ROUNDS):
        for i, count in enumerate(counts):
            dist.barrier(group)
            if rank < count:
                share = threads_per_core * count / n
                took[i] += statistics.fmean(map(math.log, steps.seconds(rank_clock(max(1.0, share)))))
    dist.all_reduce(took, group=group)
    means = [float(t) / ROUNDS / count for t, count in zip(took, counts, strict=True)]
    return {count: math.exp(mean - means[-1]) for count, mean in zip(counts, means, strict=True)}


def _measure_synchronisation(groups: HostGroups, count: int, active: ActiveRanks) -> None:
    """Measure the first ranks of every host while the others sleep."""
    inside, among = groups.first_ranks(count)
    if dist.get_rank(groups.inside) < count:
        device = torch.device("cpu")
        steps = SynchronisedSteps(device, inside)
        for _ in range(TURNS):
            steps.take()
        active.synchronisation = steps.cost(among)
        active.collectives = measure_collectives(inside, device, among=among)
    dist.barrier()
