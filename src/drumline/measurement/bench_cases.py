"""Timing of collectives and messages: verified once, then repeated in turns; the slowest rank counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Communicator
from ..core.errors import VerificationError
from .timing import Timing, synchronize, timing_of

SHARES = ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
"""Collectives whose buffer has one share per rank."""
WINDOW = 16
"""Messages in flight when bandwidth is measured."""
_SHORT = 1e-3
"""Seconds; shorter actions are timed several at a time, so that the barrier before them does not count."""


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    """One collective by one algorithm."""

    collective: str
    algorithm: str
    segments: int = 1

    @property
    def label(self) -> str:
        """`ring`, or `ring*4` in four segments."""
        return self.algorithm if self.segments == 1 else f"{self.algorithm}*{self.segments}"


def whole_bytes(collective: str, size: int, p: int, itemsize: int) -> int:
    """The nearest size with whole elements and equal shares."""
    part = itemsize * (p if collective in SHARES else 1)
    return 0 if collective == "barrier" else max(1, round(size / part)) * part


class CollectiveBench:
    """A collective of one size, ready to run by any algorithm."""

    def __init__(
        self, comm: Communicator, collective: str, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._comm, self._collective = comm, collective
        p, rank = comm.size, comm.rank
        count = size // dtype.itemsize // (p if collective in SHARES else 1)
        rows = (p, count) if collective in ("reduce_scatter", "scatter", "all_to_all") else (count,)
        results = (p, count) if collective in ("all_gather", "gather", "all_to_all") else (count,)
        self._given = [_numbers(r, rows, dtype) for r in range(p)]
        self._tensor = self._given[rank].to(device, copy=True)
        self._out = torch.empty(results, dtype=dtype, device=device)

    def action(self, case: CollectiveCase, *, comm: Communicator | None = None) -> Callable[[], Tensor | None]:
        """The action to time."""
        do, tensor, out = comm or self._comm, self._tensor, self._out
        how = {"algorithm": case.algorithm}
        if case.collective == "barrier":
            return lambda: do.barrier(algorithm=case.algorithm)
        method = getattr(do, case.collective)
        segments = case.segments if case.algorithm not in ("auto", "native") else None
        if case.collective in ("all_reduce", "broadcast"):
            return lambda: method(tensor, segments=segments, **how)
        if case.collective == "scatter" and do.rank:
            return lambda: method(None, out=out, segments=segments, **how)
        return lambda: method(tensor, out=out, segments=segments, **how)

    def check(self, case: CollectiveCase, *, comm: Communicator | None = None) -> None:
        """Run it once and compare with the expected result: whole numbers, exact in any order."""
        self._tensor.copy_(self._given[self._comm.rank])
        got = self.action(case, comm=comm)()
        wanted = self._wanted()
        if wanted is not None and (got is None or not torch.equal(got.cpu(), wanted)):
            raise VerificationError(
                f"{case.collective} by {case.label} gave a wrong result on rank {self._comm.rank}",
                where=f"{self._tensor.numel()} elements of {self._tensor.dtype} over {self._comm.transport.name}",
                rule="every algorithm gives the same result as a plain sum or copy",
            )
        self._tensor.zero_()  # sums of sums would overflow

    def _wanted(self) -> Tensor | None:
        given, rank = self._given, self._comm.rank
        match self._collective:
            case "all_reduce":
                return _sum(given)
            case "reduce":
                return _sum(given) if rank == 0 else None
            case "reduce_scatter":
                return _sum([g[rank] for g in given])
            case "scan":
                return _sum(given[: rank + 1])
            case "exscan":
                return _sum(given[:rank]) if rank else None
            case "broadcast":
                return given[0]
            case "all_gather":
                return torch.stack(given)
            case "gather":
                return torch.stack(given) if rank == 0 else None
            case "scatter":
                return given[0][rank]
            case "all_to_all":
                return torch.stack([g[rank] for g in given])
        return None


def timed(
    comm: Communicator, actions: Sequence[Callable[[], object]], repeats: int, once: float, device: str
) -> list[Timing]:
    """The median of each action's times, all of them in turns: on a shared machine only neighbours can be compared.

    `once` is about how long one takes. Of each repeat the slowest rank's time counts.
    """
    inner = actions_per_timing(once)
    table = torch.zeros(len(actions), repeats, dtype=torch.float64)
    for repeat in range(repeats):
        numbered = list(enumerate(actions))
        for i, action in numbered if repeat % 2 == 0 else reversed(numbered):
            comm.barrier(algorithm="dissemination")
            start = time.perf_counter()
            for _ in range(inner):
                action()
            synchronize(device)
            table[i, repeat] = (time.perf_counter() - start) / inner
    comm.all_reduce(table, op="max", algorithm="doubling")
    return [timing_of(row) for row in table.tolist()]


def actions_per_timing(once: float) -> int:
    """Number of short actions timed together."""
    return max(1, min(8, int(_SHORT / max(once, 1e-7))))


def latency_action(
    comm: Communicator, size: int, device: torch.device, peers: tuple[int, int] = (0, 1)
) -> Callable[[], None]:
    """A round trip between two ranks; half of its time is the latency. Other ranks do nothing."""
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    first, second = peers

    def trip() -> None:
        if comm.rank == first:
            comm.send(buffer, second)
            comm.receive(buffer, second)
        elif comm.rank == second:
            comm.receive(buffer, first)
            comm.send(buffer, first)

    return trip


def bandwidth_action(comm: Communicator, size: int, device: torch.device) -> Callable[[], None]:
    """WINDOW messages one way, then a short answer: the throughput of a full link."""
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(WINDOW)]
    answer = torch.zeros(1, dtype=torch.uint8, device=device)

    def burst() -> None:
        if comm.rank == 0:
            for pending in [comm.start_send(b, 1) for b in buffers]:
                pending.wait()
            comm.receive(answer, 1)
        elif comm.rank == 1:
            for pending in [comm.start_receive(b, 0) for b in buffers]:
                pending.wait()
            comm.send(answer, 0)

    return burst


def _numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers that differ by rank and index."""
    count = 1
    for n in shape:
        count *= n
    return (torch.arange(count) % 5 + rank % 3).to(dtype).view(shape)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
