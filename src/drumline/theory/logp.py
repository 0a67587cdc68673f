"""LogP and LogGP: what messages and schedules take when a processor's own time counts beside the wire's.

The letters are the models': latency L, overhead o, gap g, P processors; LogGP adds G, the gap between the bytes of one
long message, where LogP has a train of short ones. The best trees for both are in `cost.logp_trees`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field

from ..core.errors import InputError
from ..schedules import Schedule, messages


class Machine(ABC):
    """What a schedule is priced by: how long a message of m bytes holds the processors at both of its ends."""

    __slots__ = ()
    P: int

    @abstractmethod
    def occupies(self, m: int) -> float:
        """From the start of one message until the same processor may start the next one."""

    @abstractmethod
    def busy(self, m: int) -> float:
        """From the start of a message until its sender can do something else."""

    @abstractmethod
    def under_way(self, m: int) -> float:
        """From the start of a message until its receiver may begin to take it."""

    @abstractmethod
    def taken(self, m: int) -> float:
        """From when the receiver begins to take a message until it has it."""

    def message_seconds(self, m: int) -> float:
        """From the start of a message until the receiver has it."""
        return self.under_way(m) + self.taken(m)


@dataclass(frozen=True, slots=True)
class LogP(Machine):
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
        _check(self, "L", "o", "g")
        if self.word < 1:
            raise InputError(f"LogP with P={self.P}, words of {self.word} bytes", rule="at least 1 of each")

    @property
    def step(self) -> float:
        """Between the starts of two short messages of one processor: the gap, or the overhead where that is longer."""
        return max(self.g, self.o)

    def words(self, m: int) -> int:
        """How many short messages m bytes are; an empty one is one, too."""
        return max(1, -(-m // self.word))

    def occupies(self, m: int) -> float:
        """k max(g, o) for a train of k short messages."""
        return self.words(m) * self.step

    def busy(self, m: int) -> float:
        """(k-1) max(g, o) + o: the processor sends each of them."""
        return (self.words(m) - 1) * self.step + self.o

    def under_way(self, m: int) -> float:
        """o + L: then the first one is there."""
        return self.o + self.L

    def taken(self, m: int) -> float:
        """(k-1) max(g, o) + o: they come one by one."""
        return (self.words(m) - 1) * self.step + self.o


@dataclass(frozen=True, slots=True)
class LogGP(Machine):
    """A machine in the LogGP model: a long message is started once, and its bytes follow each other by themselves."""

    L: float
    """How long the wire takes to carry a byte."""
    o: float
    """How long a processor is busy with sending or receiving a message, however long it is."""
    g: float
    """How long lies between two messages of one processor at least."""
    G: float
    """How long lies between two bytes of a message: 1 / G is the bandwidth."""
    P: int
    """Processors."""

    def __post_init__(self) -> None:
        _check(self, "L", "o", "g", "G")

    def occupies(self, m: int) -> float:
        """(m-1) G + max(g, o): the gap begins behind the last byte."""
        return self._bytes(m) + max(self.g, self.o)

    def busy(self, m: int) -> float:
        """o: the wire does the rest."""
        return self.o

    def under_way(self, m: int) -> float:
        """o + (m-1) G + L: then the last byte is there."""
        return self.o + self._bytes(m) + self.L

    def taken(self, m: int) -> float:
        """o."""
        return self.o

    def _bytes(self, m: int) -> float:
        return max(0, m - 1) * self.G


def _check(machine: LogP | LogGP, *names: str) -> None:
    values = {name: getattr(machine, name) for name in names}
    word = type(machine).__name__
    if not all(0 <= x < float("inf") for x in values.values()):
        given = ", ".join(f"{name}={x}" for name, x in values.items())
        raise InputError(f"{word} with {given}", rule="times are finite, not negative")
    if machine.P < 1:
        raise InputError(f"{word} with P={machine.P}", rule="at least 1 of each")


@dataclass(slots=True)
class _Processor:
    """The clocks of one processor: when it is free, may send, may receive."""

    free: float = 0.0
    send: float = 0.0
    receive: float = 0.0
    arrivals: list[tuple[float, int, int]] = field(default_factory=list)
    """Of the round: when a message may be taken, who sent it, its bytes."""


def logp_seconds(schedule: Schedule, message_bytes: int, machine: Machine, *, itemsize: int = 1) -> float:
    """The time of any schedule: each rank sends its messages of a round, then takes those that come, then goes on.

    Ranks wait for nothing but their own messages.
    """
    if schedule.p > machine.P:
        raise InputError(f"{schedule.name} over {schedule.p} ranks", rule=f"the machine has P = {machine.P} processors")
    sizes = schedule.sizes(message_bytes, itemsize=itemsize)
    ranks = defaultdict[int, _Processor](_Processor)
    for sends in schedule.rounds:
        for (src, dst), parts in messages(sends).items():
            m = sum(sizes[s.chunk] for s in parts)
            ranks[dst].arrivals.append((_send(ranks[src], m, machine), src, m))
        for rank in ranks.values():
            for first, _, m in sorted(rank.arrivals):
                _receive(rank, first, m, machine)
            rank.arrivals.clear()
    return max((rank.free for rank in ranks.values()), default=0.0)


def _send(rank: _Processor, m: int, machine: Machine) -> float:
    """Send a message; when its receiver may begin to take it."""
    start = max(rank.free, rank.send)
    rank.free, rank.send = start + machine.busy(m), start + machine.occupies(m)
    return start + machine.under_way(m)


def _receive(rank: _Processor, first: float, m: int, machine: Machine) -> None:
    """Take a message that may be taken from `first` on."""
    start = max(first, rank.free, rank.receive)
    rank.free, rank.receive = start + machine.taken(m), start + machine.occupies(m)
