"""What messages cost between ranks: point-to-point, the collectives that training uses, and what they cost compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from .clock import settle
from .quota import typical

SIZES = (8, 2**12, 2**16, 2**20, 2**22, 2**24)
"""Bytes of the messages that are measured."""
OTHERS = 2**24
"""Values of other memory that a CPU touches between two messages, at most: more than its caches hold."""
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
                dist.send(buffer, second)
                dist.recv(buffer, second)
            elif rank == second:
                dist.recv(buffer, first)
                dist.send(buffer, first)

        points.append((float(size), _together(trip, device, size) / 2))
    return points


def measure_collectives(
    group: dist.ProcessGroup | None,
    device: torch.device,
    before: Callable[[str], None] | None = None,
    *,
    among: dist.ProcessGroup | None = None,
) -> dict[str, list[tuple[float, float]]]:
    """(bytes of the whole buffer, seconds) of each collective of a group, in all groups of its kind at once.

    `before` each it is called with its name. `among` are the ranks of all groups; all ranks if it is None.
    """
    ranks = dist.get_world_size(group)
    tables: dict[str, list[tuple[float, float]]] = {}
    others = torch.ones(OTHERS if device.type == "cpu" else 0)
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
                tables[name].append((bytes_whole, _amid_computing(action, device, size, others, among)))
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
    """The share of an all-reduce that proceeds while the device computes: 1 is free, 0 means they take turns.

    Computing, sending, and both at once, in turns: on a shared machine only neighbours in time can be compared.
    """
    buffer = torch.zeros(2**20, device=device)
    a = torch.randn(256, 256, device=device)
    once = _together(lambda: dist.all_reduce(buffer, group=group), device, 2**22)
    each = _together(lambda: torch.mm(a, a), device, 2**22)
    times = max(1, int(once / each))  # as much computing as the message takes

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
    settle(device.type)
    return time.perf_counter() - start


def _amid_computing(
    action: Callable[[], object],
    device: torch.device,
    size: int,
    others: torch.Tensor,
    among: dist.ProcessGroup | None,
) -> float:
    """Typical seconds of a message that comes after some computing, as in a step: caches hold `others` then.

    Ranks arrive apart; the last one's time is the message's own, so the least over the ranks counts.
    """
    repeats = 16 if size < 2**20 else 9 if size < 2**24 else 5
    a, b = torch.randn(512, 256, device=device), torch.randn(256, 256, device=device)
    action()
    times, worked = [], []
    for _ in range(repeats):
        for _ in range(3):
            torch.mm(a, b)
        others[:size].add_(1.0)  # four times as many bytes as the message has
        settle(device.type)
        start = time.perf_counter(), time.process_time()
        action()
        settle(device.type)
        times.append(time.perf_counter() - start[0])
        worked.append(time.process_time() - start[1])
    least = torch.tensor([times, worked], dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=among)
    return typical(*least.tolist())


def _together(action: Callable[[], object], device: torch.device, size: int) -> float:
    """Typical seconds of an action that all ranks do together; the slowest rank's, agreed by all."""
    repeats = 30 if size < 2**20 else 12 if size < 2**24 else 5
    action()
    dist.barrier()
    times, worked = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        action()
        settle(device.type)
        times.append(time.perf_counter() - start[0])
        worked.append(time.process_time() - start[1])
    worst = torch.tensor([typical(times, worked)], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst.item())
