"""The best broadcast and the best summation of a LogP or LogGP machine, as trees that are built processor by processor.

Broadcast: all who have the message send it on as often as they can. Summation: the same tree the other way round, where
a processor adds its own values while it waits for the sums of its children. One addition takes one unit of time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ..core.errors import InputError
from .logp import LogGP, LogP, Machine


@dataclass(frozen=True, slots=True)
class Arrival:
    """How one processor gets the message of a broadcast."""

    rank: int
    parent: int
    sent: float
    """When the parent begins to send it."""
    arrived: float
    """When this processor has it."""


def broadcast_tree(machine: Machine, m: int = 1) -> tuple[Arrival, ...]:
    """How a message of m bytes reaches all processors from processor 0, in the order in which they get it.

    No tree ends sooner: the next to get it is always the one that can get it first.
    """
    ready = [(0.0, 0)]  # (when it can begin to send, processor)
    found = []
    for rank in range(1, machine.P):
        sent, parent = heapq.heappop(ready)
        arrived = sent + machine.message_seconds(m)
        found.append(Arrival(rank, parent, sent, arrived))
        heapq.heappush(ready, (sent + machine.occupies(m), parent))
        heapq.heappush(ready, (arrived, rank))
    return tuple(found)


def optimal_broadcast_seconds(machine: Machine, m: int = 1) -> float:
    """When the last of P processors has a message of m bytes, along the best tree."""
    return max((arrival.arrived for arrival in broadcast_tree(machine, m)), default=0.0)


@dataclass(frozen=True, slots=True)
class Adder:
    """One processor of a summation."""

    rank: int
    parent: int | None
    done: float
    """When its sum is complete; then it sends it to its parent."""
    children: tuple[int, ...]
    """In the order in which it receives from them: the last one has had the most time."""
    values: int
    """How many values of its own it adds."""


@dataclass(frozen=True, slots=True)
class Summation:
    """The most values that P processors can sum up by the time T."""

    time: float
    adders: tuple[Adder, ...]

    @property
    def values(self) -> int:
        """How many values there are in the sum."""
        return sum(adder.values for adder in self.adders)


def summation_tree(machine: LogP | LogGP, time: float) -> Summation:
    """The tree that sums up most values by `time`, a whole number of additions.

    To take a child's sum costs o to receive it and 1 to add it. The last child is done L + 2o + 1 before its parent,
    and each one before it max(g, o+1) earlier. A child with t for itself adds t + 1 values and costs its parent o + 1
    of its own, so those with the most time are taken first, and none with t <= o.
    """
    if time < 0 or time != int(time):
        raise InputError(f"a summation until {time}", rule="a whole number of additions, not negative")
    late, apart = machine.L + 2 * machine.o + 1, max(machine.g, machine.o + 1)
    done: list[float] = [time]
    parents: list[int | None] = [None]
    children: list[list[int]] = [[]]
    offers = [(-(time - late), 0)]  # (minus the time of the next child, whose child it would be)
    while len(done) < machine.P and -offers[0][0] > machine.o:
        left, parent = heapq.heappop(offers)
        rank = len(done)
        done.append(-left)
        parents.append(parent)
        children.append([])
        children[parent].append(rank)
        heapq.heappush(offers, (left + apart, parent))
        heapq.heappush(offers, (left + late, rank))
    adders = tuple(
        Adder(r, parents[r], done[r], tuple(children[r][::-1]), int(done[r] - len(children[r]) * (machine.o + 1)) + 1)
        for r in range(len(done))
    )
    return Summation(time, adders)
