"""Messages between ranks: point to point, collectives, their overlap with compute, and groups of ranks by host."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..clusters import LogPTimes
from ..comm.gloo_fallbacks import irecv, isend
from ..comm.hosts import find_hosts, host_id, per_node
from ..comm.torch_transport import TorchTransport
from ..core.errors import InputError
from .cgroup import cpu_quota, typical_seconds
from .timing import synchronize

TRAINS, TRAIN_REPEATS = (16, 144), 15
"""Short messages in a short and in a long train, and how often both are sent."""
SIZES = (8, 2**12, 2**16, 2**20, 2**22, 2**24)
"""Bytes of the measured messages."""
FLUSHED_VALUES = 2**24
"""Values of other memory that a CPU touches between two messages: more than fits in its caches."""
# newer releases of torch have new names for these two
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def measure_pair(rank: int, device: torch.device, between: tuple[int, int] = (0, 1)) -> list[tuple[float, float]]:
    """(bytes, seconds) of one message between two ranks: half of a round trip. The other ranks wait."""
    first, second = between
    points = []
    for size in SIZES:
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)

        def trip(buffer: torch.Tensor = buffer) -> None:
            if rank == first:
                isend(buffer, group=None, dst=second).wait()
                irecv(buffer, group=None, src=second).wait()
            elif rank == second:
                irecv(buffer, group=None, src=first).wait()
                isend(buffer, group=None, dst=first).wait()

        points.append((float(size), _together(trip, device, size) / 2))
    return points


def measure_short_messages(rank: int, device: torch.device, between: tuple[int, int]) -> tuple[float, float]:
    """(o, g) of LogP for short messages between two ranks, as the first of them sees it; 0 on the other ranks.

    o is the time of the call that starts a send, in which the rank can do nothing else. g is the time from one message
    to the next when many are on their way: that of a long train less that of a short one, over the difference of their
    lengths, so that start and end do not count.
    """
    first, second = between
    buffers = [torch.zeros(SIZES[0], dtype=torch.uint8, device=device) for _ in range(max(TRAINS))]
    calls: list[float] = []

    def train(count: int) -> float:
        """Seconds of a train of messages, until the receiver has answered the last one."""
        start = time.perf_counter()
        if rank == first:
            works = []
            for buffer in buffers[:count]:
                begin = time.perf_counter()
                works.append(isend(buffer, group=None, dst=second))
                calls.append(time.perf_counter() - begin)
            for work in works:
                work.wait()
            irecv(buffers[0], group=None, src=second).wait()
        elif rank == second:
            for work in [irecv(buffer, group=None, src=first) for buffer in buffers[:count]]:
                work.wait()
            isend(buffers[0], group=None, dst=first).wait()
        synchronize(device.type)
        return time.perf_counter() - start

    times = []
    for _ in range(TRAIN_REPEATS + 1):
        dist.barrier()
        times.append([train(count) for count in TRAINS])
    if rank != first:
        return 0.0, 0.0
    warm = calls[sum(TRAINS) :]
    short, long = map(min, zip(*times[1:], strict=True))  # other programs only make a train longer
    return statistics.median(warm), max(0.0, (long - short) / (TRAINS[1] - TRAINS[0]))


def logp_times(points: list[tuple[float, float]], overhead: float, gap: float) -> LogPTimes:
    """L, o and g from the time of a short message, o + L + o, and the measured o and g."""
    _, one_way = points[0]
    o = min(overhead, one_way / 2)
    return LogPTimes(one_way - 2 * o, o, gap)


def measure_collectives(
    group: dist.ProcessGroup | None,
    device: torch.device,
    before: Callable[[str], None] | None = None,
    *,
    among: dist.ProcessGroup | None = None,
) -> dict[str, list[tuple[float, float]]]:
    """(bytes of the whole buffer, seconds) of each collective of a group, in all groups of its kind at once.

    `before` is called with the name of each collective. `among` is the group of all ranks that take part, if not all.
    """
    ranks = dist.get_world_size(group)
    tables: dict[str, list[tuple[float, float]]] = {}
    others = torch.ones(FLUSHED_VALUES if device.type == "cpu" else 0)
    for name in COLLECTIVES:
        if before is not None:
            before(name)
        tables[name] = []
        for size in SIZES:
            count = max(1, size // 4 // ranks)
            whole = torch.zeros(count * ranks, device=device)
            part = torch.zeros(count, device=device)
            action = _action(name, whole, part, group)
            bytes_whole = float(whole.numel() * 4)
            if not tables[name] or bytes_whole > tables[name][-1][0]:
                tables[name].append((bytes_whole, _after_compute(action, device, size, others, among)))
    return tables


def _action(
    name: str, whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "all_gather":
        return lambda: _ALL_GATHER(whole, part, group=group)
    return lambda: _REDUCE_SCATTER(part, whole, group=group)


def measure_overlap(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Share of an all-reduce that proceeds while the device computes: 1 is free, 0 means they take turns.

    Compute, communication and both at once are timed in turns: on a shared machine only adjacent timings compare.
    """
    buffer = torch.zeros(2**20, device=device)
    a = torch.randn(256, 256, device=device)
    once = _together(lambda: dist.all_reduce(buffer, group=group), device, 2**22)
    each = _together(lambda: torch.mm(a, a), device, 2**22)
    times = max(1, int(once / each))  # as much compute as the message takes

    def compute() -> None:
        for _ in range(times):
            torch.mm(a, a)

    def send() -> None:
        dist.all_reduce(buffer, group=group)

    def both() -> None:
        work = dist.all_reduce(buffer, group=group, async_op=True)
        compute()
        assert work is not None
        work.wait()

    hidden = []
    for _ in range(15):
        alone, message, together = (_once(f, device) for f in (compute, send, both))
        hidden.append((alone + message - together) / min(alone, message))
    share = torch.tensor([statistics.median(hidden)], dtype=torch.float64, device=device)
    dist.all_reduce(share)
    return min(1.0, max(0.0, float(share.item()) / dist.get_world_size()))


def _once(action: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    synchronize(device.type)
    return time.perf_counter() - start


def _after_compute(
    action: Callable[[], object], device: torch.device, size: int, others: torch.Tensor, among: dist.ProcessGroup | None
) -> float:
    """Typical seconds of a message after some compute, as in a step, with caches filled by `others`.

    Ranks arrive at different times; the last one's time is the message's own, so the least over the ranks counts.
    """
    repeats = 16 if size < 2**20 else 9 if size < 2**24 else 5
    a, b = torch.randn(512, 256, device=device), torch.randn(256, 256, device=device)
    action()
    times, cpu_times = [], []
    for _ in range(repeats):
        for _ in range(3):
            torch.mm(a, b)
        others[:size].add_(1.0)  # four times as many bytes as the message has
        synchronize(device.type)
        start = time.perf_counter(), time.process_time()
        action()
        synchronize(device.type)
        times.append(time.perf_counter() - start[0])
        cpu_times.append(time.process_time() - start[1])
    least = torch.tensor([times, cpu_times], dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=among)
    return typical_seconds(*least.tolist())


def _together(action: Callable[[], object], device: torch.device, size: int) -> float:
    """Typical seconds of an action of all ranks: the slowest rank's, equal on all."""
    repeats = 30 if size < 2**20 else 12 if size < 2**24 else 5
    action()
    dist.barrier()
    times, cpu_times = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        action()
        synchronize(device.type)
        times.append(time.perf_counter() - start[0])
        cpu_times.append(time.process_time() - start[1])
    worst = torch.tensor([typical_seconds(times, cpu_times)], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst.item())


def alpha_beta(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Fit alpha + beta m to (bytes, seconds) by least squares of relative errors: (alpha, beta, mean error)."""
    # minimise the sum of ((alpha + beta m - t) / t)^2: linear in alpha and beta
    w = [1 / t**2 for _, t in points]
    s0 = sum(w)
    s1 = sum(wi * m for wi, (m, _) in zip(w, points, strict=True))
    s2 = sum(wi * m * m for wi, (m, _) in zip(w, points, strict=True))
    y0 = sum(wi * t for wi, (_, t) in zip(w, points, strict=True))
    y1 = sum(wi * t * m for wi, (m, t) in zip(w, points, strict=True))
    det = s0 * s2 - s1 * s1
    alpha = (y0 * s2 - y1 * s1) / det
    beta = (y1 * s0 - y0 * s1) / det
    largest = max(points)
    if beta <= 0:  # noise hid the slope: take the largest message as all bandwidth
        beta = largest[1] / largest[0]
    alpha = max(alpha, 0.0)
    error = sum(abs(alpha + beta * m - t) / t for m, t in points) / len(points)
    return alpha, beta, error


@dataclass(frozen=True, slots=True, eq=False)
class HostGroups:
    """The process groups of this rank's host."""

    hosts: int
    per_host: int
    inside: dist.ProcessGroup
    """The ranks of this host; all ranks if every host has one."""
    oversubscription: float = 1.0
    """Threads of the ranks per core that this rank's control group allows; at least 1."""

    def first_ranks(self, count: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Groups of the first `count` ranks of this host, and of all hosts. All ranks of all hosts call it."""
        firsts = [[host * self.per_host + i for i in range(count)] for host in range(self.hosts)]
        groups = [dist.new_group(ranks) for ranks in firsts]
        among = dist.new_group([rank for ranks in firsts for rank in ranks]) if self.hosts > 1 else groups[0]
        inside = groups[dist.get_rank() // self.per_host]
        assert inside is not None and among is not None
        return inside, among

    @property
    def near_pair(self) -> tuple[int, int] | None:
        """Two ranks of one host, or None."""
        return (0, 1) if self.per_host > 1 else None

    @property
    def far_pair(self) -> tuple[int, int] | None:
        """Two ranks of different hosts, or None."""
        return (0, self.per_host) if self.hosts > 1 else None


def find_host_groups() -> HostGroups:
    """Find the host of each rank and make the groups. All ranks call it."""
    world = dist.group.WORLD
    assert world is not None
    if dist.get_world_size() == 1:
        return HostGroups(1, 1, world, _threads_per_core())
    hosts = find_hosts(TorchTransport())
    count = per_node(hosts)
    if count is None:
        sizes = ", ".join(str(len(ranks)) for ranks in hosts)
        raise InputError(
            f"hosts with {sizes} ranks, or ranks that are not numbered host by host",
            rule="a cluster has equally many devices in each node, numbered one after the other",
            fix="start the same number of ranks on every host, as torchrun does",
        )
    if len(hosts) == 1 or count == 1:
        return HostGroups(len(hosts), count, world, _threads_per_core())
    groups = [dist.new_group(list(ranks)) for ranks in hosts]
    inside = groups[dist.get_rank() // count]
    assert inside is not None
    return HostGroups(len(hosts), count, inside, _threads_per_core())


def _threads_per_core() -> float:
    """Threads per core of this rank's control group, whose ranks share its quota; 1 for GPUs. All ranks call it."""
    if torch.cuda.is_available():
        return 1.0
    share = cpu_quota()
    group = f"{host_id()}\0{share.group if share else ''}".encode()
    mine = torch.tensor(list(hashlib.sha256(group).digest()), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    same = sum(torch.equal(mine, other) for other in every)
    return max(1.0, same * torch.get_num_threads() / share.cores) if share else 1.0
