"""Which replicas average after which step, where each takes steps by itself: local SGD and gossip, without tensors.

A step is counted from 1: step n is the n-th batch of the job. Every rank computes the same schedule by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ALONE, HOST, ALL = "alone", "host", "all"
"""Whom a replica averages with after a step: no other, those of its host, or all."""


@dataclass(frozen=True, slots=True)
class AveragingSchedule:
    """The averages of `sync=local:k`."""

    every: int
    """k: steps between averages."""
    first: int = 0
    """Steps at the start that each end with an average over all replicas."""
    across: int = 0
    """Steps between averages over all replicas, while others are inside a host; 0: every average is over all."""

    def after(self, step: int) -> str:
        """With whom a replica averages after a step: ALONE, HOST or ALL."""
        if step <= self.first or step % (self.across or self.every) == 0:
            return ALL
        return HOST if step % self.every == 0 else ALONE


def ring_neighbours(rank: int, ranks: int) -> tuple[int, ...]:
    """The ranks before and after this one on a ring: two, one of two ranks, none of one."""
    return tuple(sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank}))


def random_partner(rank: int, ranks: int, *, seed: int, step: int) -> int | None:
    """This rank's partner in a random matching of all ranks, drawn from seed and step; None for the odd one left."""
    order = list(range(ranks))
    random.Random(f"matching {seed} {step}").shuffle(order)
    place = order.index(rank)
    partner = place ^ 1
    return order[partner] if partner < ranks else None
