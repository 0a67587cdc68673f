"""`drumline bench` on the ranks: all collectives, sizes and algorithms over a transport, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..clusters import Link
from ..clusters.links import RankLink
from ..comm import Communicator, ShmTransport, TorchTransport, Transport, run_threads
from ..comm.environment import connect
from ..core.errors import InputError
from ..core.units import format_bytes
from ..costs.collectives import price
from ..reports.bench_results import BenchResult
from ..schedules import ALGORITHMS, NATIVE, collective_schedule, segmented
from .bench_cases import (
    WINDOW,
    CollectiveBench,
    CollectiveCase,
    actions_per_timing,
    bandwidth_action,
    latency_action,
    timed,
    whole_bytes,
)
from .bench_config import MESSAGES, BenchConfig, BenchOutcome, parse_algorithm
from .links import alpha_beta
from .timing import Timing

_FIT = (8, 2**12, 2**16, 2**20, 2**22)
"""Bytes of the messages that the links are fitted to."""
_FIT_SHARE = 0.1
"""Share of the time for the fit."""
_SEGMENTS = (4, 16)
_LEAST, _MOST = 3, 60
"""Repeats of a case."""

Emit = Callable[[dict[str, Any]], None]


def bench_rank(emit: Emit, config: BenchConfig) -> BenchOutcome:
    """Measure one rank over the transports between processes."""
    outcome, where = BenchOutcome(), connect()
    share = replace(config, seconds=config.seconds / len(config.transports))
    for name in config.transports:
        transport, device = open_transport(name, where.local_rank)
        try:
            outcome.add(bench_over(transport, share, device, emit if where.rank == 0 else _silent))
        finally:
            if isinstance(transport, ShmTransport):
                transport.close()
    return outcome


def bench_threads(emit: Emit, config: BenchConfig, ranks: int) -> BenchOutcome:
    """Measure all ranks as threads of this process."""
    cpu = torch.device("cpu")
    share = replace(config, seconds=config.seconds / len(config.transports))

    def body(transport: Transport) -> BenchOutcome:
        return bench_over(transport, share, cpu, emit if transport.rank == 0 else _silent)

    return run_threads(body, ranks)[0]


def open_transport(name: str, local_rank: int) -> tuple[Transport, torch.device]:
    """The named transport over the connected ranks, and the device of its tensors."""
    cpu = torch.device("cpu")
    if name == "gloo":
        return TorchTransport(torch.distributed.new_group(backend="gloo")), cpu
    if name == "shm":
        return ShmTransport.over(), cpu
    if name == "nccl":
        if not torch.cuda.is_available():
            raise InputError("transport nccl on a machine without CUDA", rule="nccl joins GPUs")
        return TorchTransport(), torch.device("cuda", local_rank % torch.cuda.device_count())
    if name == "mpi":
        from ..comm.mpi.transport import MpiTransport

        return MpiTransport(), cpu
    raise InputError(f"transport {name!r} between processes", rule="gloo, shm, nccl, mpi")


def bench_over(transport: Transport, config: BenchConfig, device: torch.device, emit: Emit) -> BenchOutcome:
    """Measure over one transport. All ranks call it; rank 0 decides, so that all do the same."""
    return _Session(transport, config, device, emit).run()


class _Session:
    """Measurements over one transport."""

    def __init__(self, transport: Transport, config: BenchConfig, device: torch.device, emit: Emit) -> None:
        self.config, self.device, self.emit = config, device, emit
        self.transport, self.p = transport, transport.size
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        # timed without the check that all ranks make the same call; every case is verified before
        self.comm = Communicator(transport, cluster=config.cluster, check=False)
        self.end = time.monotonic() + config.seconds
        self.outcome = BenchOutcome()
        self.latest: dict[CollectiveCase, tuple[int, float]] = {}
        self.begun: set[str] = set()
        self.link = Link(0.0, 1.0)

    def run(self) -> BenchOutcome:
        """Fit the links, which predictions need; then measure sizes from small to large."""
        jobs = list(self._jobs())
        if self.p > 1:
            self._fit()
        auto_links = None if self.config.cluster is not None or self.p == 1 else self.link
        self.auto = Communicator(self.transport, cluster=self.config.cluster, links=auto_links, check=False)
        for number, (collective, size) in enumerate(jobs):
            self.emit({"what": f"{collective} {size}", "done": number, "total": len(jobs), "name": self.transport.name})
            share = (self.end - time.monotonic()) / (len(jobs) - number)
            # the first size of each is always measured, so that no collective is missing
            if not self._agree(number < len(self.config.collectives) or time.monotonic() < self.end):
                self.outcome.skipped.append(f"{collective} of {format_bytes(size)} over {self.transport.name}")
                continue
            (self._message if collective in MESSAGES else self._collective)(collective, size, share)
        return self.outcome

    def _jobs(self) -> Iterator[tuple[str, int]]:
        for position, size in enumerate(self.config.sizes):
            for collective in self.config.collectives:
                if collective in MESSAGES:
                    if self.p > 1:
                        yield collective, size
                elif collective != "barrier" or position == 0:
                    yield collective, whole_bytes(collective, size, self.p, self.dtype.itemsize)

    def _agree(self, value: float) -> float:
        """Rank 0's value, on all ranks."""
        decision = torch.tensor([float(value)], dtype=torch.float64)
        return float(self.comm.broadcast(decision, algorithm="binomial").item())

    # ---- messages

    def _fit(self) -> None:
        points = [(float(size), self._half_trip(size, (0, 1))) for size in _FIT]
        alpha, beta, error = alpha_beta(points)
        self.link = Link(alpha, 1 / beta)
        self.outcome.links[self.transport.name] = self.link, error
        if self.config.pairs:
            for a in range(self.p):
                for b in range(a + 1, self.p):
                    points = [(float(size), self._half_trip(size, (a, b))) for size in (_FIT[0], _FIT[3])]
                    alpha, beta, _ = alpha_beta(points)
                    link = Link(alpha, 1 / beta)
                    self.outcome.pairs += [RankLink(a, b, link), RankLink(b, a, link)]

    def _half_trip(self, size: int, peers: tuple[int, int]) -> float:
        """Seconds of one message, within a small share of the time limit."""
        trip = latency_action(self.comm, size, self.device, peers)
        trip()
        once = self._once(trip)
        share = _FIT_SHARE * self.config.seconds / len(_FIT)
        return timed(self.comm, [trip], self._repeats(share, [once], once), once, self.device.type)[0].seconds / 2

    def _message(self, kind: str, size: int, share: float) -> None:
        make = latency_action if kind == "latency" else bandwidth_action
        action = make(self.comm, size, self.device)
        once = self._once(action)
        timing = timed(self.comm, [action], self._repeats(share, [once], once), once, self.device.type)[0]
        parts, predicted = (2, self.link.alpha + size * self.link.beta) if kind == "latency" else (WINDOW, None)
        self._result(CollectiveCase(kind, "message"), size, Timing(timing.seconds / parts, timing.spread), predicted)

    # ---- collectives

    def _collective(self, collective: str, size: int, share: float) -> None:
        bench = CollectiveBench(self.comm, collective, size, self.dtype, self.device)
        cases = self._cases(collective, size)
        if collective in self.begun:
            cases = self._affordable(cases, size, share)
        self.begun.add(collective)
        firsts: dict[CollectiveCase, float] = {}
        for case in cases:
            bench.check(case, comm=self._of(case))
            firsts[case] = self._once(bench.action(case, comm=self._of(case)))
        if not cases:
            return
        actions = [bench.action(case, comm=self._of(case)) for case in cases]
        once = min(firsts.values())
        timings = timed(self.comm, actions, self._repeats(share, list(firsts.values()), once), once, self.device.type)
        for case, measured in zip(cases, timings, strict=True):
            self.latest[case] = size, measured.seconds
            self._result(case, size, measured, self._predicted(case, size))

    def _of(self, case: CollectiveCase) -> Communicator:
        return self.auto if case.algorithm == "auto" else self.comm

    def _cases(self, collective: str, size: int) -> list[CollectiveCase]:
        """The requested algorithms that this collective has."""
        native = self.transport.native(collective) is not None
        if self.config.algorithms != ("all",):
            known = {*ALGORITHMS[collective], "auto", *([NATIVE] if native else [])}
            parsed = [parse_algorithm(text) for text in self.config.algorithms]
            return [CollectiveCase(collective, name, n) for name, n in parsed if name in known]
        cases = [CollectiveCase(collective, name) for name in ALGORITHMS[collective]]
        for name in ALGORITHMS[collective]:
            n = _best_segments(collective, name, self.p, size, self.link) if self.p > 1 else 1
            cases += [CollectiveCase(collective, name, n)] if n > 1 else []
        return [*cases, *([CollectiveCase(collective, NATIVE)] if native else []), CollectiveCase(collective, "auto")]

    def _affordable(self, cases: Sequence[CollectiveCase], size: int, share: float) -> list[CollectiveCase]:
        """The cases that fit into the time limit, judged by their time for the last size."""
        limit = max(4 * share, 1.0) if time.monotonic() < self.end + max(share, 0.5) else -1.0
        flags = torch.tensor([(_LEAST + 2) * self._expected(case, size) < limit for case in cases])
        self.comm.broadcast(flags, algorithm="binomial")
        for case, kept in zip(cases, flags.tolist(), strict=True):
            if not kept:
                what = f"{case.collective} of {format_bytes(size)} by {case.label}"
                self.outcome.skipped.append(f"{what} over {self.transport.name}")
        return [case for case, kept in zip(cases, flags.tolist(), strict=True) if kept]

    def _expected(self, case: CollectiveCase, size: int) -> float:
        """Expected time: extra bytes pass a link at most 2p times, or as often as the last time suggests."""
        before, took = self.latest.get(case, (size, 0.0))
        return min(took * size / max(before, 1), took + 2 * self.p * (size - before) * self.link.beta)

    def _once(self, action: Callable[[], object]) -> float:
        start = time.perf_counter()
        action()
        return self._agree(time.perf_counter() - start)

    def _repeats(self, share: float, firsts: Sequence[float], once: float) -> int:
        """Repeats that the share of time allows, each with a barrier before it."""
        turn = sum(firsts) * actions_per_timing(once) + len(firsts) * self.link.alpha
        return int(self._agree(max(_LEAST, min(_MOST, int(share / max(turn, 1e-5))))))

    def _predicted(self, case: CollectiveCase, size: int) -> float | None:
        if self.p == 1:
            return 0.0
        if case.algorithm == "auto":
            chosen = self.auto.choose(case.collective, size, itemsize=self.dtype.itemsize)
            case = CollectiveCase(case.collective, chosen.algorithm, chosen.segments)
        if case.algorithm == NATIVE:
            return None
        schedule = segmented(collective_schedule(case.collective, case.algorithm, self.p), case.segments)
        return price(schedule, size, self.link, itemsize=self.dtype.itemsize)

    def _result(self, case: CollectiveCase, size: int, measured: Timing, predicted: float | None) -> None:
        chosen = ""
        if case.algorithm == "auto":
            choice = self.auto.choose(case.collective, size, itemsize=self.dtype.itemsize)
            chosen = CollectiveCase(case.collective, choice.algorithm, choice.segments).label
        self.outcome.results.append(
            BenchResult(
                case.collective,
                self.transport.name,
                case.algorithm,
                self.p,
                size,
                measured.seconds,
                predicted,
                case.segments,
                measured.spread,
                chosen,
            )
        )


@lru_cache(maxsize=4096)
def _best_segments(collective: str, algorithm: str, p: int, size: int, link: Link) -> int:
    """Number of segments that makes an algorithm at least a tenth faster by price, or 1."""
    whole = collective_schedule(collective, algorithm, p)
    best, least = 1, 0.9 * price(whole, size, link)
    for n in _SEGMENTS:
        if size < n * 4096 * whole.chunks:
            break
        seconds = price(segmented(whole, n), size, link)
        if seconds < least:
            best, least = n, seconds
    return best


def _silent(record: dict[str, Any]) -> None:
    """Discard: only rank 0 reports."""
