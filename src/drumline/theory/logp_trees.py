"""Optimal broadcast and summation trees of a LogP or LogGP machine, built processor by processor.

Broadcast: every processor with the message sends it on as often as it can. Summation: the same tree backwards, where a
processor adds its own values while it waits for the sums of its children. One addition takes one unit of time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ..core.errors import InputError
from .logp import LogGP, LogP, Machine


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival of a broadcast at one processor."""

    rank: int
    parent: int
    sent: float
    """Time at which the parent starts to send."""
    arrived: float
    """Time at which this processor has the message."""


def broadcast_tree(machine: Machine, m: int = 1) -> tuple[Arrival, ...]:
    """Arrivals of a message of m bytes from processor 0 at all others, in order.

    No tree ends sooner: the next arrival is always the earliest possible one.
    """
    ready = [(0.0, 0)]  # (time of its next send, processor)
    arrivals = []
    for rank in range(1, machine.P):
        sent, parent = heapq.heappop(ready)
        arrived = sent + machine.message_seconds(m)
        arrivals.append(Arrival(rank, parent, sent, arrived))
        heapq.heappush(ready, (sent + machine.occupies(m), parent))
        heapq.heappush(ready, (arrived, rank))
    return tuple(arrivals)


def optimal_broadcast_seconds(machine: Machine, m: int = 1) -> float:
    """Time at which the last of P processors has a message of m bytes, along the optimal tree."""
    return max((arrival.arrived for arrival in broadcast_tree(machine, m)), default=0.0)


@dataclass(frozen=True, slots=True)
class Adder:
    """One processor of a summation."""

    rank: int
    parent: int | None
    done: float
    """Time at which its sum is complete and is sent to the parent."""
    children: tuple[int, ...]
    """In the order of receipt: the last one has had the most time."""
    values: int
    """Number of own values that it adds."""


@dataclass(frozen=True, slots=True)
class Summation:
    """The most values that P processors can sum by a given time."""

    time: float
    adders: tuple[Adder, ...]

    @property
    def values(self) -> int:
        """Number of values in the sum."""
        return sum(adder.values for adder in self.adders)


def summation_tree(machine: LogP | LogGP, time: float) -> Summation:
    """The tree that sums the most values by `time`, a whole number of additions.

    A child costs its parent o to receive its sum and 1 to add it. The last child finishes L + 2o + 1 before its parent,
    and each earlier one max(g, o+1) before the next. A child with time t adds t + 1 values, so children with the most
    time come first, and none with t <= o is worth it.
    """
    if time < 0 or time != int(time):
        raise InputError(f"a summation until {time}", rule="a whole number of additions, not negative")
    lead, spacing = machine.L + 2 * machine.o + 1, max(machine.g, machine.o + 1)
    done: list[float] = [time]
    parents: list[int | None] = [None]
    children: list[list[int]] = [[]]
    offers = [(-(time - lead), 0)]  # (minus the time of the next child, its parent)
    while len(done) < machine.P and -offers[0][0] > machine.o:
        left, parent = heapq.heappop(offers)
        rank = len(done)
        done.append(-left)
        parents.append(parent)
        children.append([])
        children[parent].append(rank)
        heapq.heappush(offers, (left + spacing, parent))
        heapq.heappush(offers, (left + lead, rank))
    adders = tuple(
        Adder(r, parents[r], done[r], tuple(children[r][::-1]), int(done[r] - len(children[r]) * (machine.o + 1)) + 1)
        for r in range(len(done))
    )
    return Summation(time, adders)
