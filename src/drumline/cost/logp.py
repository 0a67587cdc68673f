"""LogP: what messages, schedules and the best broadcast take when a processor's own time counts beside the wire's.

The letters are the model's: latency L, overhead o, gap g, P processors. A long message is a train of short ones.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from ..errors import InputError
from ..schedule import Schedule, messages


@dataclass(frozen=True, slots=True)
class LogP:
    """A machine in the LogP model; times in seconds, or in any other unit, which is then that of all results."""

    L: float
    """How long the wire takes to carry a short message."""
    o: float
    """How long a processor is busy with sending or receiving a short message."""
    g: float
    """How long lies between two short messages of one processor at least."""
    P: int
    """Processors."""
    word: int = 8
    """Bytes of a short message."""

    def __post_init__(self) -> None:
        if not all(0 <= x < float("inf") for x in (self.L, self.o, self.g)):
            raise InputError(f"LogP with L={self.L}, o={self.o}, g={self.g}", rule="times are finite, not negative")
        if self.P < 1 or self.word < 1:
            raise InputError(f"LogP with P={self.P}, words of {self.word} bytes", rule="at least 1 of each")

    @property
    def step(self) -> float:
        """Between the starts of two short messages of one processor: the gap, or the overhead where that is longer."""
        return max(self.g, self.o)

    def words(self, m: int) -> int:
        """How many short messages m bytes are; an empty one is one, too."""
        return max(1, -(-m // self.word))

    def message_seconds(self, m: int) -> float:
        """o + (k-1) max(g, o) + L + o for a train of k short messages."""
        return self.o + (self.words(m) - 1) * self.step + self.L + self.o


@dataclass(slots=True)
class _Processor:
    """The clocks of one processor: when it is free, may send, may receive."""

    free: float = 0.0
    send: float = 0.0
    receive: float = 0.0


def logp_seconds(schedule: Schedule, message_bytes: int, machine: LogP, *, itemsize: int = 1) -> float:
    """The time of any schedule: each rank sends its messages of a round, then takes those that come, then goes on.

    Ranks wait for nothing but their own messages. A processor is busy for o with each word that it sends or receives.
    """
    if schedule.p > machine.P:
        raise InputError(f"{schedule.name} over {schedule.p} ranks", rule=f"the machine has P = {machine.P} processors")
    sizes = schedule.sizes(message_bytes, itemsize=itemsize)
    ranks = [_Processor() for _ in range(schedule.p)]
    for sends in schedule.rounds:
        coming: defaultdict[int, list[tuple[float, int, int]]] = defaultdict(list)
        for (src, dst), parts in messages(sends).items():
            words = machine.words(sum(sizes[s.chunk] for s in parts))
            coming[dst].append((_send(ranks[src], words, machine), src, words))
        for dst, arrivals in coming.items():
            for first, _, words in sorted(arrivals):
                _receive(ranks[dst], first, words, machine)
    return max(rank.free for rank in ranks)


def _send(rank: _Processor, words: int, machine: LogP) -> float:
    """Send a train; when its first word is there."""
    start = max(rank.free, rank.send)
    last = start + (words - 1) * machine.step
    rank.free, rank.send = last + machine.o, last + machine.step
    return start + machine.o + machine.L


def _receive(rank: _Processor, first: float, words: int, machine: LogP) -> None:
    """Take a train whose first word arrives at `first` and whose others follow it step by step."""
    last = max(first, rank.free, rank.receive) + (words - 1) * machine.step
    rank.free, rank.receive = last + machine.o, last + machine.step


def optimal_broadcast_seconds(machine: LogP) -> float:
    """When the last of P processors has a short message, if all who have it send it on as often as they can.

    The tree that does it is `schedule.logp_broadcast`.
    """
    ready = [0.0]
    last = 0.0
    for _ in range(machine.P - 1):
        now = heapq.heappop(ready)
        last = max(last, now + machine.message_seconds(machine.word))
        heapq.heappush(ready, now + machine.step)
        heapq.heappush(ready, now + machine.message_seconds(machine.word))
    return last
