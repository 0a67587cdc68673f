"""Which rank is slow, and in which phase: a few numbers of each rank, compared now and then."""

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
"""Steps between two comparisons: one all-gather of 32 bytes a rank."""


def slowest(engine: Engine, numbers: Sequence[int]) -> tuple[int, str, float] | None:
    """Rank, phase and how many times as long its own work takes as the fastest rank's, over some remembered steps.

    Called on all ranks together. None with one rank, or when nothing was recorded.
    """
    if engine.ranks == 1 or not numbers:
        return None
    seen = [engine.record.own(n) for n in numbers]
    own = [statistics.median(s.get(phase, 0.0) for s in seen) for phase in PHASES]
    mine = torch.tensor(own, dtype=torch.float64, device=engine.device)
    table = [torch.empty_like(mine) for _ in range(engine.ranks)]
    dist.all_gather(table, mine, group=engine.group)
    return compare([row.tolist() for row in table])


def compare(table: list[list[float]]) -> tuple[int, str, float] | None:
    """From seconds by rank and phase: who is slowest, where it loses most against the others, by what factor."""
    sums = [sum(row) for row in table]
    if min(sums) <= 0:
        return None
    rank = max(range(len(table)), key=lambda r: sums[r])
    usual = [statistics.median(row[i] for row in table) for i in range(len(PHASES))]
    lost = [own - other for own, other in zip(table[rank], usual, strict=True)]
    phase = PHASES[max(range(len(PHASES)), key=lambda i: lost[i])]
    return rank, phase, sums[rank] / min(sums)
