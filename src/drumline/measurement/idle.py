"""Ranks of a host while others of them are idle: they share its cores, caches and memory with fewer."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .levels import Levels
from .links import measure_collectives
from .meeting import Meetings, Waiting
from .shared import own_clock
from .situ import Steps

ROUNDS, MEETINGS = 2, 3
"""How often each number of ranks has its turn; and how often their meetings are taken."""


@dataclass(slots=True)
class AtWork:
    """What was measured of so many ranks of a host."""

    pace: float
    """The factor on what each takes to compute, against all of them at once."""
    waiting: Waiting | None = None
    """How they meet; None where that was not measured."""
    collectives: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def measure_fewer(levels: Levels, steps: Steps, crowd: float) -> dict[int, AtWork]:
    """By how many ranks of a host work. All ranks call it.

    How they meet is measured where all of them share cores: there the others take turns with them. Elsewhere ranks meet
    as fast beside others as without.
    """
    counts = [k for k in (2**i for i in range(16)) if k < levels.per_host] + [levels.per_host]
    found = {count: AtWork(pace) for count, pace in _paces(levels, counts, steps, crowd).items()}
    most = torch.tensor([crowd], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)  # shares of cores may differ; what is measured together may not
    for count in counts[:-1]:
        if count > 1 and most.item() > 1:
            _meet(levels, count, found[count])
    return found


def _paces(levels: Levels, counts: list[int], steps: Steps, crowd: float) -> dict[int, float]:
    """Small steps by each number of ranks in turns, of every shape as much."""
    group, n, rank = levels.inside, levels.per_host, dist.get_rank(levels.inside)
    took = torch.zeros(len(counts), dtype=torch.float64)
    for _ in range(ROUNDS):
        for i, count in enumerate(counts):
            dist.barrier(group)
            if rank < count:
                share = crowd * count / n
                took[i] += statistics.fmean(map(math.log, steps.seconds(own_clock(max(1.0, share)))))
    dist.all_reduce(took, group=group)
    means = [float(t) / ROUNDS / count for t, count in zip(took, counts, strict=True)]
    return {count: math.exp(mean - means[-1]) for count, mean in zip(counts, means, strict=True)}


def _meet(levels: Levels, count: int, found: AtWork) -> None:
    """The first ranks of every host meet, while the others sleep."""
    inside, among = levels.first(count)
    if dist.get_rank(levels.inside) < count:
        device = torch.device("cpu")
        meetings = Meetings(device, inside)
        for _ in range(MEETINGS):
            meetings.take()
        found.waiting = meetings.waiting(among)
        found.collectives = measure_collectives(inside, device, among=among)
    dist.barrier()
