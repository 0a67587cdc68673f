"""Finds the slowest rank and its phase, by comparing a few numbers of every rank from time to time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ..engine import Engine

PHASES = ("data", "forward", "backward", "optimizer")
EVERY = 10
"""Steps between comparisons: one all-gather of 32 bytes per rank."""


def slowest_rank(engine: Engine, steps: Sequence[int]) -> tuple[int, str, float] | None:
    """The slowest rank, its slowest phase, and its own time relative to the fastest rank's, over some recorded steps.

    Called on all ranks together. None with one rank, or if nothing was recorded.
    """
    if engine.ranks == 1 or not steps:
        return None
    recorded = [engine.record.own_seconds(n) for n in steps]
    own = [statistics.median(s.get(phase, 0.0) for s in recorded) for phase in PHASES]
    mine = torch.tensor(own, dtype=torch.float64, device=engine.device)
    table = [torch.empty_like(mine) for _ in range(engine.ranks)]
    dist.all_gather(table, mine, group=engine.group)
    return compare([row.tolist() for row in table])


def compare(table: list[list[float]]) -> tuple[int, str, float] | None:
    """From seconds by rank and phase: the slowest rank, the phase where it loses most, and the factor."""
    sums = [sum(row) for row in table]
    if min(sums) <= 0:
        return None
    rank = max(range(len(table)), key=lambda r: sums[r])
    typical = [statistics.median(row[i] for row in table) for i in range(len(PHASES))]
    lost = [own - other for own, other in zip(table[rank], typical, strict=True)]
    phase = PHASES[max(range(len(PHASES)), key=lambda i: lost[i])]
    return rank, phase, sums[rank] / min(sums)
