"""LogP and LogGP: times of messages and schedules where processor time counts as well as link time.

Latency L, overhead o, gap g, P processors; LogGP adds G, the gap between the bytes of one long message, where LogP has
a train of short ones. The optimal trees for both are in logp_trees.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field

from ..clusters import Link
from ..core.errors import InputError
from ..schedules import Schedule, messages


class Machine(ABC):
    """A machine model: how long a message of m bytes occupies the processors at both ends."""

    __slots__ = ()
    P: int

    @abstractmethod
    def occupies(self, m: int) -> float:
        """Time from the start of one message until the same processor may start the next one."""

    @abstractmethod
    def busy(self, m: int) -> float:
        """Time from the start of a message until its sender is free."""

    @abstractmethod
    def transit(self, m: int) -> float:
        """Time from the start of a message until its receiver can start to receive it."""

    @abstractmethod
    def receive_time(self, m: int) -> float:
        """Time that the receiver takes to receive a message."""

    def message_seconds(self, m: int) -> float:
        """Time from the start of a message until the receiver has it."""
        return self.transit(m) + self.receive_time(m)


@dataclass(frozen=True, slots=True)
class LogP(Machine):
    """A machine in the LogP model; times in seconds, or in any other unit, which is then that of all results."""

    L: float
    """Time of a short message on the link."""
    o: float
    """Processor time to send or receive a short message."""
    g: float
    """Minimum time between two short messages of one processor."""
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
        """Time between the starts of two short messages of one processor: the longer of gap and overhead."""
        return max(self.g, self.o)

    def words(self, m: int) -> int:
        """Number of short messages for m bytes; at least one."""
        return max(1, -(-m // self.word))

    def occupies(self, m: int) -> float:
        """k max(g, o) for a train of k short messages."""
        return self.words(m) * self.step

    def busy(self, m: int) -> float:
        """(k-1) max(g, o) + o: the processor sends each of them."""
        return (self.words(m) - 1) * self.step + self.o

    def transit(self, m: int) -> float:
        """o + L: then the first one has arrived."""
        return self.o + self.L

    def receive_time(self, m: int) -> float:
        """(k-1) max(g, o) + o: they arrive one by one."""
        return (self.words(m) - 1) * self.step + self.o


@dataclass(frozen=True, slots=True)
class LogGP(Machine):
    """A machine in the LogGP model: a long message is started once, then its bytes follow without the processor."""

    L: float
    """Time of one byte on the link."""
    o: float
    """Processor time to send or receive a message of any length."""
    g: float
    """Minimum time between two messages of one processor."""
    G: float
    """Time between two bytes of a message: 1 / G is the bandwidth."""
    P: int
    """Processors."""

    def __post_init__(self) -> None:
        _check(self, "L", "o", "g", "G")

    @classmethod
    def of(cls, link: Link, P: int) -> LogGP:
        """P ranks on a link whose short messages were measured: its L, o and g, and G = beta."""
        if link.logp is None:
            raise InputError(
                "a link without L, o and g",
                rule="`drumline measure` measures them",
                fix="node.link.logp = {L, o, g} in the cluster file",
            )
        return cls(link.logp.L, link.logp.o, link.logp.g, link.beta, P)

    def occupies(self, m: int) -> float:
        """(m-1) G + max(g, o): the gap begins after the last byte."""
        return self._bytes(m) + max(self.g, self.o)

    def busy(self, m: int) -> float:
        """o: the link does the rest."""
        return self.o

    def transit(self, m: int) -> float:
        """o + (m-1) G + L: then the last byte has arrived."""
        return self.o + self._bytes(m) + self.L

    def receive_time(self, m: int) -> float:
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
    """Messages of the round: (arrival, sender, bytes)."""


def logp_seconds(schedule: Schedule, message_bytes: int, machine: Machine, *, itemsize: int = 1) -> float:
    """Time of any schedule: in each round a rank sends its messages, then receives. Ranks do not synchronise."""
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
    """Send a message; return when its receiver can start to receive it."""
    start = max(rank.free, rank.send)
    rank.free, rank.send = start + machine.busy(m), start + machine.occupies(m)
    return start + machine.transit(m)


def _receive(rank: _Processor, first: float, m: int, machine: Machine) -> None:
    """Receive a message that is available from `first` on."""
    start = max(first, rank.free, rank.receive)
    rank.free, rank.receive = start + machine.receive_time(m), start + machine.occupies(m)
