"""`drumline bench` on the ranks: every collective, size and algorithm over a transport, within a number of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..clusters import Link
from ..clusters.spec import RankLink
from ..comm import Communicator, ShmTransport, TorchTransport, Transport, run_threads
from ..comm.choose import NATIVE
from ..comm.environment import connect
from ..core.errors import InputError
from ..core.units import format_bytes
from ..costs.collectives import price
from ..reports.bench import Result
from ..schedules import ALGORITHMS, collective_schedule, segmented
from .benchconfig import MESSAGES, Config, Outcome, parse_algorithm
from .clock import Timing
from .collectives import WINDOW, Bench, Case, at_a_time, bandwidth_action, latency_action, timed, whole_bytes
from .fit import alpha_beta

_FIT = (8, 2**12, 2**16, 2**20, 2**22)
"""Bytes of the messages that the links are fitted to."""
_FITTING = 0.1
"""The share of the time that the fit may take."""
_SEGMENTS = (4, 16)
_LEAST, _MOST = 3, 60
"""Repeats of a case."""

Emit = Callable[[dict[str, Any]], None]


def bench_rank(emit: Emit, config: Config) -> Outcome:
    """One rank's part, over the transports between processes."""
    outcome, where = Outcome(), connect()
    share = replace(config, seconds=config.seconds / len(config.transports))
    for name in config.transports:
        transport, device = open_transport(name, where.local_rank)
        try:
            outcome.add(bench_over(transport, share, device, emit if where.rank == 0 else _silent))
        finally:
            if isinstance(transport, ShmTransport):
                transport.close()
    return outcome


def bench_threads(emit: Emit, config: Config, ranks: int) -> Outcome:
    """All ranks, as threads of this process."""
    cpu = torch.device("cpu")
    share = replace(config, seconds=config.seconds / len(config.transports))

    def body(transport: Transport) -> Outcome:
        return bench_over(transport, share, cpu, emit if transport.rank == 0 else _silent)

    return run_threads(body, ranks)[0]


def open_transport(name: str, local_rank: int) -> tuple[Transport, torch.device]:
    """The transport of that name over the ranks that are connected, and the device of its tensors."""
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


def bench_over(transport: Transport, config: Config, device: torch.device, emit: Emit) -> Outcome:
    """All ranks call it; the decisions are rank 0's, so that all do the same."""
    return _Session(transport, config, device, emit).run()


class _Session:
    """The measurements over one transport."""

    def __init__(self, transport: Transport, config: Config, device: torch.device, emit: Emit) -> None:
        self.config, self.device, self.emit = config, device, emit
        self.transport, self.p = transport, transport.size
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        # Timed without the comparison of calls, which is the same for all; every case is checked before.
        self.comm = Communicator(transport, cluster=config.cluster, check=False)
        self.end = time.monotonic() + config.seconds
        self.outcome = Outcome()
        self.latest: dict[Case, tuple[int, float]] = {}
        self.begun: set[str] = set()
        self.link = Link(0.0, 1.0)

    def run(self) -> Outcome:
        """Links first, because what is predicted comes from them; then sizes from small to large."""
        jobs = list(self._jobs())
        if self.p > 1:
            self._fit()
        auto_links = None if self.config.cluster is not None or self.p == 1 else self.link
        self.auto = Communicator(self.transport, cluster=self.config.cluster, links=auto_links, check=False)
        for number, (collective, size) in enumerate(jobs):
            self.emit({"what": f"{collective} {size}", "done": number, "total": len(jobs), "name": self.transport.name})
            share = (self.end - time.monotonic()) / (len(jobs) - number)
            # the first size of each is measured in any case, so that nothing is left out altogether
            if not self._agree(number < len(self.config.collectives) or time.monotonic() < self.end):
                self.outcome.left_out.append(f"{collective} of {format_bytes(size)} over {self.transport.name}")
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
        """Rank 0's number, on all ranks."""
        told = torch.tensor([float(value)], dtype=torch.float64)
        return float(self.comm.broadcast(told, algorithm="binomial").item())

    # ---- messages

    def _fit(self) -> None:
        points = [(float(size), self._half_trip(size, (0, 1))) for size in _FIT]
        alpha, beta, error = alpha_beta(points)
        self.link = Link(alpha, 1 / beta)
        self.outcome.links[self.transport.name] = self.link, error
        if self.config.pairs:
            for a in range(self.p):
                for b in range(a + 1, self.p):
                    found = [(float(size), self._half_trip(size, (a, b))) for size in (_FIT[0], _FIT[3])]
                    alpha, beta, _ = alpha_beta(found)
                    link = Link(alpha, 1 / beta)
                    self.outcome.pairs += [RankLink(a, b, link), RankLink(b, a, link)]

    def _half_trip(self, size: int, peers: tuple[int, int]) -> float:
        """Seconds of one message, within a small share of the time."""
        trip = latency_action(self.comm, size, self.device, peers)
        trip()
        once = self._once(trip)
        share = _FITTING * self.config.seconds / len(_FIT)
        return timed(self.comm, [trip], self._repeats(share, [once], once), once, self.device.type)[0].seconds / 2

    def _message(self, kind: str, size: int, share: float) -> None:
        make = latency_action if kind == "latency" else bandwidth_action
        action = make(self.comm, size, self.device)
        once = self._once(action)
        found = timed(self.comm, [action], self._repeats(share, [once], once), once, self.device.type)[0]
        parts, predicted = (2, self.link.alpha + size * self.link.beta) if kind == "latency" else (WINDOW, None)
        self._result(Case(kind, "message"), size, Timing(found.seconds / parts, found.spread), predicted)

    # ---- collectives

    def _collective(self, collective: str, size: int, share: float) -> None:
        bench = Bench(self.comm, collective, size, self.dtype, self.device)
        cases = self._cases(collective, size)
        if collective in self.begun:
            cases = self._affordable(cases, size, share)
        self.begun.add(collective)
        firsts: dict[Case, float] = {}
        for case in cases:
            bench.check(case, comm=self._of(case))
            firsts[case] = self._once(bench.action(case, comm=self._of(case)))
        if not cases:
            return
        actions = [bench.action(case, comm=self._of(case)) for case in cases]
        once = min(firsts.values())
        found = timed(self.comm, actions, self._repeats(share, list(firsts.values()), once), once, self.device.type)
        for case, measured in zip(cases, found, strict=True):
            self.latest[case] = size, measured.seconds
            self._result(case, size, measured, self._predicted(case, size))

    def _of(self, case: Case) -> Communicator:
        return self.auto if case.algorithm == "auto" else self.comm

    def _cases(self, collective: str, size: int) -> list[Case]:
        """The algorithms that were asked for, as far as this collective has them."""
        native = self.transport.native(collective) is not None
        if self.config.algorithms != ("all",):
            known = {*ALGORITHMS[collective], "auto", *([NATIVE] if native else [])}
            parsed = [parse_algorithm(text) for text in self.config.algorithms]
            return [Case(collective, name, n) for name, n in parsed if name in known]
        cases = [Case(collective, name) for name in ALGORITHMS[collective]]
        for name in ALGORITHMS[collective]:
            n = _worth_cutting(collective, name, self.p, size, self.link) if self.p > 1 else 1
            cases += [Case(collective, name, n)] if n > 1 else []
        return [*cases, *([Case(collective, NATIVE)] if native else []), Case(collective, "auto")]

    def _affordable(self, cases: Sequence[Case], size: int, share: float) -> list[Case]:
        """Without those that would take longer than several groups are given, by what they took for the last size."""
        limit = max(4 * share, 1.0) if time.monotonic() < self.end + max(share, 0.5) else -1.0
        flags = torch.tensor([(_LEAST + 2) * self._expected(case, size) < limit for case in cases])
        self.comm.broadcast(flags, algorithm="binomial")
        for case, kept in zip(cases, flags.tolist(), strict=True):
            if not kept:
                what = f"{case.collective} of {format_bytes(size)} by {case.label}"
                self.outcome.left_out.append(f"{what} over {self.transport.name}")
        return [case for case, kept in zip(cases, flags.tolist(), strict=True) if kept]

    def _expected(self, case: Case, size: int) -> float:
        """Each byte more goes over a link 2p times at most, or as often as it seems to have gone so far."""
        before, took = self.latest.get(case, (size, 0.0))
        return min(took * size / max(before, 1), took + 2 * self.p * (size - before) * self.link.beta)

    def _once(self, action: Callable[[], object]) -> float:
        start = time.perf_counter()
        action()
        return self._agree(time.perf_counter() - start)

    def _repeats(self, share: float, firsts: Sequence[float], once: float) -> int:
        """As often as the share of time allows, with the barrier before each."""
        turn = sum(firsts) * at_a_time(once) + len(firsts) * self.link.alpha
        return int(self._agree(max(_LEAST, min(_MOST, int(share / max(turn, 1e-5))))))

    def _predicted(self, case: Case, size: int) -> float | None:
        if self.p == 1:
            return 0.0
        if case.algorithm == "auto":
            chosen = self.auto.choose(case.collective, size, itemsize=self.dtype.itemsize)
            case = Case(case.collective, chosen.algorithm, chosen.segments)
        if case.algorithm == NATIVE:
            return None
        schedule = segmented(collective_schedule(case.collective, case.algorithm, self.p), case.segments)
        return price(schedule, size, self.link, itemsize=self.dtype.itemsize)

    def _result(self, case: Case, size: int, measured: Timing, predicted: float | None) -> None:
        chosen = ""
        if case.algorithm == "auto":
            choice = self.auto.choose(case.collective, size, itemsize=self.dtype.itemsize)
            chosen = Case(case.collective, choice.algorithm, choice.segments).label
        self.outcome.results.append(
            Result(
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
def _worth_cutting(collective: str, algorithm: str, p: int, size: int, link: Link) -> int:
    """The number of segments by which an algorithm gains a tenth or more by price; 1 where there is none."""
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
    """Only rank 0 speaks."""
