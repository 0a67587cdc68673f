"""Scaling of the classic all-reduces with the ranks: rounds, bytes at the busiest node, fan-in, from schedules.

N is the bytes of the buffer and P the ranks, as in textbooks; elsewhere they are m and p.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from ..core.errors import InputError
from ..schedules import Schedule, collective_schedule, messages

CLASSIC = {"server": "parameter server", "naive": "decentralised, one at a time", "ring": "ring"}
"""Algorithm -> name in the table."""

HEADS = ("all-reduce", "rounds", "busiest node, a round", "busiest node, in all", "fan-in")

_POINTS = (64, 128, 256)
"""Ranks at which growth is sampled: three, for the three terms of a P + b + c / P."""


@dataclass(frozen=True, slots=True)
class ScheduleCounts:
    """Counts of one schedule; bytes as fractions of N."""

    rounds: int
    round_bytes: Fraction
    """Most bytes that one rank sends or receives in one round."""
    all_bytes: Fraction
    """Most bytes that one rank sends or receives in total."""
    fan_in: int
    """Most messages that one rank receives in one round."""

    def numbers(self) -> tuple[Fraction, ...]:
        """All four, in the order of HEADS."""
        return Fraction(self.rounds), self.round_bytes, self.all_bytes, Fraction(self.fan_in)


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """One algorithm: exact counts for P ranks, and their orders of growth."""

    algorithm: str
    name: str
    p: int
    counts: ScheduleCounts
    growth: tuple[Growth, ...]
    """Growth of each count, in the order of HEADS."""

    @property
    def orders(self) -> tuple[str, ...]:
        """Orders of growth, in the order of HEADS: `O(1)`, `O(P)`, `O(N P)`."""
        return tuple(one.order for one in self.growth)

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of HEADS: order, formula, and count for P ranks."""
        return (self.name, *(one.cell(n) for n, one in zip(self.counts.numbers(), self.growth, strict=True)))


@dataclass(frozen=True, slots=True)
class Growth:
    """Exact growth of a count: a P + b + c / P."""

    a: Fraction
    b: Fraction
    c: Fraction
    letter: str
    """`N` where the count is a fraction of the bytes."""

    @classmethod
    def through(cls, numbers: tuple[Fraction, ...], letter: str) -> Growth:
        """The growth through these values at _POINTS."""
        (x, y, z), (u, v, w) = _POINTS, (n * p for n, p in zip(numbers, _POINTS, strict=True))
        # n P = a P^2 + b P + c, by divided differences
        first, second = (v - u) / (y - x), (w - v) / (z - y)
        a = (second - first) / (z - x)
        b = first - a * (x + y)
        return cls(a, b, u - a * x * x - b * x, letter)

    def at(self, p: int) -> Fraction:
        """The count for p ranks."""
        return self.a * p + self.b + self.c / p

    @property
    def order(self) -> str:
        """The fastest growing term, without its factor."""
        if self.a:
            return f"O({self.letter}{' ' if self.letter else ''}P)"
        return f"O({self.letter or 1})" if self.b else f"O({self.letter or 1}/P)"

    def cell(self, number: Fraction) -> str:
        """Order, formula, and the count where it depends on the ranks."""
        return f"{self.order}: {self}" + (f" = {self._times(number)}" if self.a or self.c else "")

    def __str__(self) -> str:
        if not self.a and not self.b:
            return f"{self._times(self.c)}/P"
        terms = [f"{n}{tail}" for n, tail in ((self.a, "P"), (self.b, ""), (self.c, "/P")) if n]
        text = " + ".join(terms).replace("+ -", "- ").replace("1P", "P")
        return f"({text}) {self.letter}" if self.letter and len(terms) > 1 else self._times(text)

    def _times(self, number: Fraction | str) -> str:
        """A multiple of N, or a plain number."""
        if not self.letter:
            return str(number)
        return self.letter if str(number) == "1" else f"{number} {self.letter}"


def counts(schedule: Schedule) -> ScheduleCounts:
    """Count a schedule, send by send."""
    one = schedule.sizes(schedule.chunks)  # as many elements as chunks: fractions of N are exact
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    rounds = most = fan_in = 0
    for sends in schedule.rounds:
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for s in sends:
            out[s.src] += one[s.chunk]
            into[s.dst] += one[s.chunk]
        arrivals = Counter(dst for _, dst in messages(sends))
        rounds += 1
        fan_in = max(fan_in, *arrivals.values())
        most = max(most, *out.values(), *into.values())
        sent += out
        received += into
    whole = max([0, *sent.values(), *received.values()])
    return ScheduleCounts(rounds, Fraction(most, schedule.chunks), Fraction(whole, schedule.chunks), fan_in)


def growth_table(p: int) -> list[GrowthRow]:
    """Parameter server, decentralised and ring all-reduce for p ranks."""
    if not 2 <= p <= 4096:
        raise InputError(f"a table for {p} ranks", rule="from 2 to 4096 ranks")
    rows = []
    for algorithm, name in CLASSIC.items():
        here, *points = (counts(collective_schedule("all_reduce", algorithm, n)).numbers() for n in (p, *_POINTS))
        grown = zip(*points, ("", "N", "N", ""), strict=True)
        growth = tuple(Growth.through((x, y, z), letter) for x, y, z, letter in grown)
        rows.append(GrowthRow(algorithm, name, p, ScheduleCounts(int(here[0]), here[1], here[2], int(here[3])), growth))
    return rows


def markdown(rows: list[GrowthRow]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADS, ("---",) * len(HEADS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
