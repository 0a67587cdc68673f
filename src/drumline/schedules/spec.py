"""What a collective is: rounds of sends over numbered chunks, and the contract that they keep.

The readers (`check`, `cost`, `simulate`, `report`, `comm`) know this form only, never an algorithm.
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
    """Chunk `chunk` goes from `src` to `dst`; the receiver adds it if `reduce`, else keeps it."""

    src: int
    dst: int
    chunk: int
    reduce: bool

    def __str__(self) -> str:
        return f"{self.src}->{self.dst} {'+' if self.reduce else '='}{self.chunk}"


Round = tuple[Send, ...]
Range = tuple[int, int]
Names = Literal["free", "shares", "pairs", "line"]
"""Chunk numbers say nothing, whose share it is, or from whom to whom; in a `line` ranks cannot be renamed at all."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds that are written anew each time they are read: a schedule of a thousand ranks costs nothing to name."""

    write: Callable[..., Iterator[list[Send]]]
    """The algorithm: one loop that yields the sends of each round."""
    arguments: tuple[Hashable, ...]
    """What it is called with. With `write` it makes two schedules equal, hashable and picklable."""

    def __iter__(self) -> Iterator[Round]:
        return map(tuple, self.write(*self.arguments))


@dataclass(frozen=True, slots=True)
class Contract:
    """What a collective promises, whatever the algorithm: who holds which chunk before, and what is in it after."""

    collective: str
    """The name that tables of measured times use, such as `all_reduce`."""
    before: Callable[[Schedule, int, int], bool]
    """(schedule, rank, chunk): whether the rank has a contribution to the chunk at the start."""
    after: Callable[[Schedule, int, int], tuple[int, ...] | None]
    """(schedule, rank, chunk): the ranks whose contributions the rank holds at the end, None where it is not said."""
    text: str
    """The same promise for a person."""
    rooted: bool = False
    """Whether it singles out a root."""
    idempotent: bool = False
    """Whether a contribution may be added more than once."""
    chunk_names: Names = "free"
    """What the number of a chunk says about ranks, which matters when ranks are renamed."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank did in a collective, or in several."""

    rounds: int = 0
    """Rounds in which it sent or received."""
    messages: int = 0
    """Messages that it sent: all sends of one (round, src, dst) are one."""
    bytes: int = 0
    """Bytes that it sent."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.rounds + other.rounds, self.messages + other.messages, self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.rounds - other.rounds, self.messages - other.messages, self.bytes - other.bytes)

    def __str__(self) -> str:
        return f"{self.rounds} rounds, {self.messages} messages, {self.bytes} bytes sent"


def even_ranges(total: int, parts: int) -> tuple[Range, ...]:
    """Where each of `parts` begins and ends: equal parts, the first `total % parts` one element longer."""
    size, longer = divmod(total, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return tuple(itertools.pairwise(starts))


@dataclass(frozen=True, slots=True)
class Schedule:
    """One collective by one algorithm over p ranks: who sends which chunk to whom, round by round.

    All sends of a round read the state before the round. Sends of one (round, src, dst) are one message. A chunk that
    several sends of a round add to takes them in the order in which they stand.
    """

    name: str
    contract: Contract
    p: int
    """Ranks."""
    chunks: int
    """Parts that the buffer is cut into."""
    rounds: Rounds | tuple[Round, ...]
    root: int = 0
    """The rank that the contract singles out, where it does."""
    split: Callable[[int, int], tuple[Range, ...]] = even_ranges
    """(elements of a rank's buffer, chunks) -> where each chunk lies in it; chunks of different ranks may overlap."""
    order: Literal["received", "local", "rank"] = "received"
    """Which operand stands first when a chunk is added: what was received, what the receiver held, or that of the
    lower rank number (what was received exactly when src < dst)."""

    def __post_init__(self) -> None:
        if self.p < 1:
            raise InputError(f"{self.name} over {self.p} ranks", rule="a collective has at least one rank")
        if self.chunks < 1:
            raise InputError(f"{self.name} with {self.chunks} chunks", rule="a buffer is at least one chunk")
        if not 0 <= self.root < self.p:
            raise InputError(f"{self.name}: root {self.root}", rule=f"0 <= root < p = {self.p}")

    @property
    def collective(self) -> str:
        """What it computes, such as `all_reduce`."""
        return self.contract.collective

    def ranges(self, elements: int) -> tuple[Range, ...]:
        """Where each chunk of a buffer of that many elements begins and ends."""
        return self.split(elements, self.chunks)

    def sizes(self, message_bytes: int, *, itemsize: int = 1) -> tuple[int, ...]:
        """The bytes of each chunk of a buffer of that many bytes, whose elements of `itemsize` bytes stay whole."""
        if message_bytes < 0 or message_bytes % itemsize:
            raise InputError(
                f"{self.name} of {message_bytes} bytes", rule=f"a multiple of the {itemsize} bytes of an element"
            )
        return tuple((stop - start) * itemsize for start, stop in self.ranges(message_bytes // itemsize))

    def count_rounds(self) -> int:
        """How many rounds there are."""
        return sum(1 for _ in self.rounds)

    @property
    def fan_in(self) -> int:
        """The most messages that one rank receives in one round."""
        arrivals = (Counter(dst for _, dst in messages(sends)) for sends in self.rounds)
        return max((max(found.values(), default=0) for found in arrivals), default=0)

    def received_first(self, send: Send) -> bool:
        """Whether what `send` brings is the first operand where it is added."""
        return send.src < send.dst if self.order == "rank" else self.order == "received"

    def traffic(self, message_bytes: int, *, itemsize: int = 1) -> tuple[Traffic, ...]:
        """What each rank sends, counted from the rounds alone."""
        sizes = self.sizes(message_bytes, itemsize=itemsize)
        total = [Traffic()] * self.p
        for sends in self.rounds:
            for (src, _), parts in messages(sends).items():
                total[src] += Traffic(messages=1, bytes=sum(sizes[s.chunk] for s in parts))
            for rank in {s.src for s in sends} | {s.dst for s in sends}:
                total[rank] += Traffic(rounds=1)
        return tuple(total)

    def __str__(self) -> str:
        # A buffer of as many elements as chunks has whole chunks, so the share of m is exact.
        traffic = self.traffic(self.chunks)
        share = Fraction(max(t.bytes for t in traffic), self.chunks)
        return (
            f"{self.name} p={self.p}: {_number(self.count_rounds(), 'round')}; a rank sends at most "
            f"{_number(max(t.messages for t in traffic), 'message')}, {_formula(share)} bytes "
            f"(m bytes in {_number(self.chunks, 'chunk')})"
        )


def messages(sends: Iterable[Send]) -> dict[tuple[int, int], list[Send]]:
    """The sends of one round as messages: by (src, dst), in the order in which they stand."""
    found: dict[tuple[int, int], list[Send]] = {}
    for send in sends:
        found.setdefault((send.src, send.dst), []).append(send)
    return found


def _number(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _formula(share: Fraction) -> str:
    return "0" if share == 0 else "m" if share == 1 else f"{share} m"
