"""The form of a collective: rounds of sends of numbered chunks, and the contract that they keep.

Checkers, cost models, the simulator, reports and the communicator read this form, never an algorithm.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ..core.errors import InputError


@dataclass(frozen=True, slots=True)
class Send:
    """Send chunk `chunk` from `src` to `dst`; the receiver adds it if `reduce`, else replaces its own."""

    src: int
    dst: int
    chunk: int
    reduce: bool

    def __str__(self) -> str:
        return f"{self.src}->{self.dst} {'+' if self.reduce else '='}{self.chunk}"


Round = tuple[Send, ...]
Range = tuple[int, int]
Names = Literal["free", "shares", "pairs", "line"]
"""Meaning of chunk numbers: none, the owner of a share, or (sender, receiver); in a `line` ranks cannot be renamed."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds that are generated whenever they are read, so that a schedule of a thousand ranks takes no memory."""

    write: Callable[..., Iterator[list[Send]]]
    """The algorithm: a generator of the sends of each round."""
    arguments: tuple[Hashable, ...]
    """Arguments of `write`. Both together make schedules comparable, hashable and picklable."""

    def __iter__(self) -> Iterator[Round]:
        return map(tuple, self.write(*self.arguments))


@dataclass(frozen=True, slots=True)
class Contract:
    """The promise of a collective, for any algorithm: which chunks a rank has before, and what they contain after."""

    collective: str
    """The name in tables of measured times, such as `all_reduce`."""
    before: Callable[[Schedule, int, int], bool]
    """(schedule, rank, chunk): whether the rank has a contribution to the chunk at the start."""
    after: Callable[[Schedule, int, int], tuple[int, ...] | None]
    """(schedule, rank, chunk): the ranks whose contributions the chunk contains at the end; None where unspecified."""
    text: str
    """The promise in words."""
    rooted: bool = False
    """Whether it has a root."""
    idempotent: bool = False
    """Whether a contribution may be added more than once."""
    chunk_names: Names = "free"
    """Meaning of chunk numbers, which matters when ranks are renamed."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one rank in one or several collectives."""

    rounds: int = 0
    """Rounds with a send or a receive."""
    messages: int = 0
    """Messages sent; all sends of one (round, src, dst) are one message."""
    bytes: int = 0
    """Bytes sent."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.rounds + other.rounds, self.messages + other.messages, self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.rounds - other.rounds, self.messages - other.messages, self.bytes - other.bytes)

    def __str__(self) -> str:
        return f"{self.rounds} rounds, {self.messages} messages, {self.bytes} bytes sent"


def even_ranges(total: int, parts: int) -> tuple[Range, ...]:
    """Start and end of each of `parts` equal ranges; the first `total % parts` are one element longer."""
    size, longer = divmod(total, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return tuple(itertools.pairwise(starts))


@dataclass(frozen=True, slots=True)
class Schedule:
    """One collective by one algorithm over p ranks: the sends of every round.

    All sends of a round read the state before the round. Sends of one (round, src, dst) are one message. Several sends
    that add to one chunk in a round are applied in their order.
    """

    name: str
    contract: Contract
    p: int
    """Ranks."""
    chunks: int
    """Number of chunks of the buffer."""
    rounds: Rounds | tuple[Round, ...]
    root: int = 0
    """The root, where the contract has one."""
    split: Callable[[int, int], tuple[Range, ...]] = even_ranges
    """(elements of a rank's buffer, chunks) -> range of each chunk; chunks of different ranks may overlap."""
    order: Literal["received", "local", "rank"] = "received"
    """The first operand when a chunk is added: the received one, the local one, or that of the lower rank (the received
    one if src < dst)."""

    def __post_init__(self) -> None:
        if self.p < 1:
            raise InputError(f"{self.name} over {self.p} ranks", rule="a collective has at least one rank")
        if self.chunks < 1:
            raise InputError(f"{self.name} with {self.chunks} chunks", rule="a buffer has at least one chunk")
        if not 0 <= self.root < self.p:
            raise InputError(f"{self.name}: root {self.root}", rule=f"0 <= root < p = {self.p}")

    @property
    def collective(self) -> str:
        """Name of the collective, such as `all_reduce`."""
        return self.contract.collective

    def ranges(self, elements: int) -> tuple[Range, ...]:
        """Range of each chunk in a buffer of `elements`."""
        return self.split(elements, self.chunks)

    def sizes(self, message_bytes: int, *, itemsize: int = 1) -> tuple[int, ...]:
        """Bytes of each chunk of a buffer of `message_bytes`; elements of `itemsize` bytes are not split."""
        if message_bytes < 0 or message_bytes % itemsize:
            raise InputError(
                f"{self.name} of {message_bytes} bytes", rule=f"a multiple of the {itemsize} bytes of an element"
            )
        return tuple((stop - start) * itemsize for start, stop in self.ranges(message_bytes // itemsize))

    def count_rounds(self) -> int:
        """Number of rounds."""
        return sum(1 for _ in self.rounds)

    @property
    def fan_in(self) -> int:
        """The most messages that one rank receives in one round."""
        arrivals = (Counter(dst for _, dst in messages(sends)) for sends in self.rounds)
        return max((max(counts.values(), default=0) for counts in arrivals), default=0)

    def received_first(self, send: Send) -> bool:
        """Whether the received chunk is the first operand of the addition."""
        return send.src < send.dst if self.order == "rank" else self.order == "received"

    def traffic(self, message_bytes: int, *, itemsize: int = 1) -> tuple[Traffic, ...]:
        """Traffic of each rank, counted from the rounds."""
        sizes = self.sizes(message_bytes, itemsize=itemsize)
        total = [Traffic()] * self.p
        for sends in self.rounds:
            for (src, _), parts in messages(sends).items():
                total[src] += Traffic(messages=1, bytes=sum(sizes[s.chunk] for s in parts))
            for rank in {s.src for s in sends} | {s.dst for s in sends}:
                total[rank] += Traffic(rounds=1)
        return tuple(total)

    def __str__(self) -> str:
        # with as many elements as chunks the fraction of m is exact
        traffic = self.traffic(self.chunks)
        share = Fraction(max(t.bytes for t in traffic), self.chunks)
        return (
            f"{self.name} p={self.p}: {_number(self.count_rounds(), 'round')}; a rank sends at most "
            f"{_number(max(t.messages for t in traffic), 'message')}, {_formula(share)} bytes "
            f"(m bytes in {_number(self.chunks, 'chunk')})"
        )


def messages(sends: Iterable[Send]) -> dict[tuple[int, int], list[Send]]:
    """Messages of one round: its sends grouped by (src, dst), in order."""
    grouped: dict[tuple[int, int], list[Send]] = {}
    for send in sends:
        grouped.setdefault((send.src, send.dst), []).append(send)
    return grouped


def _number(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _formula(share: Fraction) -> str:
    return "0" if share == 0 else "m" if share == 1 else f"{share} m"
