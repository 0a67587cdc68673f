"""Finds the slowest rank and its phase, the network included, and how long each rank waited for the others.

From time to time the ranks exchange the times of their last steps. In a synchronous step all ranks end together, so a
slow rank shows in its own work, and in how little it waits: what the rank that waits least still spends in messages is
their transfer, and what the others wait beyond that, they wait for it. Only durations are compared, so clocks of hosts
need not agree. A slow link delays every rank alike. If no rank is slow but messages take long, the links are timed one
by one (link_probe.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .link_probe import LinkProbe
from .step_times import PHASES, WAIT, recorded_times

if TYPE_CHECKING:
    from ..engine import Engine

EVERY = 10
"""Steps between comparisons: one all-gather of 560 bytes per rank."""
SLOW = 1 / 0.75
"""A rank is slow if its own work takes longer than the fastest rank's by this factor."""
_STEADY = 0.2
"""The share of steps that may be faster than the factor says: a rank is slow if it is so in most steps."""
_HARMLESS = 0.05
"""Ranks whose own work differs by less than this share of a step are even, however little work that is."""

Slowest = tuple[int, str, float]
"""Rank, phase, and its own time relative to the fastest rank's."""
Times = list[list[list[float]]]
"""Seconds by rank, step, and phase; the last column is the wait."""


@dataclass(frozen=True, slots=True)
class RankComparison:
    """The result of one comparison."""

    slowest: Slowest | None
    wait_seconds: tuple[float, ...]
    """By rank, over the compared steps."""
    network_share: float | None = None
    """Share of a step that messages take when no rank is late; None in a pipeline, where it cannot be separated."""

    def report(self) -> dict[str, object]:
        """The fields of a step's report."""
        return {name: getattr(self, name) for name in ("slowest", "wait_seconds", "network_share")}


class RankWatch:
    """Compares the ranks of one training from time to time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._steps = engine, 0
        self._pipelined = engine.plan.pp > 1
        self._probe = LinkProbe(engine.group, engine.ranks)

    def after_step(self, *, met: bool, skip: Collection[int]) -> RankComparison | None:
        """Count a step; compare every `EVERY` steps, or where ranks meet next."""
        self._steps += 1
        if self._steps < EVERY or not met:
            return None
        self._steps = 0
        return self.compare(self._engine.record.steps[-EVERY:], skip=skip)

    def compare(self, steps: Sequence[int], *, skip: Collection[int] = ()) -> RankComparison | None:
        """Compare some recorded steps, at most EVERY. Called on all ranks together.

        `skip` are steps whose times say nothing about a rank: one under the profiler. None with one rank, or if nothing
        was recorded.
        """
        # where the end of a message is not exact, its wait cannot be separated from the rank's own work
        recent = list(steps)[-EVERY:]
        exact = [n for n in recent if self._engine.record.is_timed(n)]
        if self._engine.ranks == 1 or not exact:
            return None
        times = self._gather(exact)
        counted = [i for i, n in enumerate(exact) if n not in skip]
        share = len(recent) / len(exact)
        waits = tuple(share * s for s in wait_seconds(times, pipelined=self._pipelined))
        compared = [[rows[i] for i in counted] for rows in times]
        slowest = find_slowest(compared)
        if slowest is None or self._pipelined:
            return RankComparison(slowest, waits)
        transfer, length = transfer_seconds(compared), step_seconds(compared)
        if slowest[2] <= SLOW:
            slow_link = self._probe.slow_rank(transfer, length, steps=len(counted))
            slowest = (slow_link[0], "network", slow_link[1]) if slow_link else slowest
        return RankComparison(slowest, waits, transfer / length)

    def _gather(self, steps: Sequence[int]) -> Times:
        """The times of every rank; rows of steps that are not there are zero, so that all send the same size."""
        engine = self._engine
        rows = [recorded_times(engine.record, n, pipelined=self._pipelined) for n in steps]
        rows += [[0.0] * (WAIT + 1)] * (EVERY - len(rows))
        mine = torch.tensor(rows, dtype=torch.float64, device=engine.device)
        table = [torch.empty_like(mine) for _ in range(engine.ranks)]
        dist.all_gather(table, mine, group=engine.group)
        return [t[: len(steps)].tolist() for t in table]


def slowest_rank(engine: Engine, steps: Sequence[int]) -> Slowest | None:
    """The slowest rank over some recorded steps, its slowest phase and its factor. Called on all ranks together."""
    result = RankWatch(engine).compare(steps)
    return result.slowest if result else None


def find_slowest(times: Times) -> Slowest | None:
    """The slowest rank, the phase where it loses most, and its own work relative to that of the fastest rank.

    The factor is what four of five steps reach, so that a few slow steps of a busy machine do not count.
    """
    own = [[sum(row[:WAIT]) for row in rows] for rows in times]
    usual = [statistics.median(rank) if rank else 0.0 for rank in own]
    if not usual or min(usual) <= 0:
        return None
    slow, fast = (pick(range(len(usual)), key=lambda r: usual[r]) for pick in (max, min))
    ratios = sorted(a / b for a, b in zip(own[slow], own[fast], strict=True) if b > 0)
    factor = max(1.0, ratios[int(_STEADY * len(ratios))])
    lost = usual[slow] - usual[fast]
    if lost < _HARMLESS * step_seconds(times):
        factor = min(factor, 1 + lost / step_seconds(times))
    return slow, _slow_phase(times, slow), factor


def _slow_phase(times: Times, rank: int) -> str:
    """The phase in which a rank loses most against the median of the other ranks."""

    def typical(r: int, phase: int) -> float:
        return statistics.median(row[phase] for row in times[r])

    others = [r for r in range(len(times)) if r != rank]
    lost = [typical(rank, p) - statistics.median(typical(r, p) for r in others) for p in range(len(PHASES))]
    return PHASES[max(range(len(PHASES)), key=lambda p: lost[p])]


def wait_seconds(times: Times, *, pipelined: bool = False) -> tuple[float, ...]:
    """Seconds that each rank waited for the others in all these steps: its time in messages beyond their transfer.

    The stages of a pipeline wait at different times, so the least wait is no transfer: there, all of it counts.
    """
    total = [0.0] * len(times)
    for rows in zip(*times, strict=True):
        transfer = 0.0 if pipelined else min(row[WAIT] for row in rows)
        total = [sum_ + row[WAIT] - transfer for sum_, row in zip(total, rows, strict=True)]
    return tuple(total)


def transfer_seconds(times: Times) -> float:
    """The time that messages take in a step when all ranks are there: the least wait of any rank."""
    least: list[float] = [min(row[WAIT] for row in rows) for rows in zip(*times, strict=True)]
    return statistics.median(least)


def step_seconds(times: Times) -> float:
    """The usual length of a step, with all its parts."""
    longest: list[float] = [max(sum(row) for row in rows) for rows in zip(*times, strict=True)]
    return statistics.median(longest)
