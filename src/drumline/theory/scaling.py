"""Scaling of the classic all-reduces with the ranks: rounds, bytes at the busiest node, fan-in, from schedules.

N is the bytes of the buffer and P the ranks, as in textbooks; elsewhere they are m and p.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from ..core.errors import InputError
from ..schedules import Schedule, collective_schedule, messages
from ..schedules.exchange import exchange_by_pairs, exchange_in_turns, partitioned_exchange

CLASSIC = {
    "server": "parameter server",
    "naive": "along a line, one at a time",
    "exchange_by_pairs": "all to all, one at a time",
    "exchange_in_turns": "all to all, in turns",
    "partitioned_exchange": "partitioned all to all, in turns",
    "direct": "partitioned all to all, at once (direct)",
    "ring": "ring",
}
"""Algorithm -> name in the table."""

_EXCHANGES = {
    "exchange_by_pairs": exchange_by_pairs,
    "exchange_in_turns": exchange_in_turns,
    "partitioned_exchange": partitioned_exchange,
}

HEADS = ("all-reduce", "rounds", "busiest node, a round", "busiest node, in all", "fan-in")

_POINTS = (8, 16, 24, 32)
"""Ranks at which growth is sampled: four, for the four terms of q P^2 + a P + b + c / P."""
COUNTED_RANKS = 256
"""Ranks up to which the schedules themselves are counted; beyond, the growth through _POINTS is evaluated."""


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
    """Exact growth of a count: q P^2 + a P + b + c / P."""

    q: Fraction
    a: Fraction
    b: Fraction
    c: Fraction
    letter: str
    """`N` where the count is a fraction of the bytes."""

    @classmethod
    def through(cls, numbers: tuple[Fraction, ...], letter: str) -> Growth:
        """The growth through these values at _POINTS."""
        # n P = q P^3 + a P^2 + b P + c, by Newton's divided differences
        points, row = _POINTS, [n * p for n, p in zip(numbers, _POINTS, strict=True)]
        newton = [row[0]]
        for width in range(1, len(points)):
            row = [(row[i + 1] - row[i]) / (points[i + width] - points[i]) for i in range(len(row) - 1)]
            newton.append(row[0])
        # the nested form, multiplied out from the inside: coefficients of 1, P, P^2, P^3
        terms = [newton[-1]]
        for x, top in zip(reversed(points[:-1]), reversed(newton[:-1]), strict=True):
            raised, lowered = [Fraction(0), *terms], [-x * t for t in terms] + [Fraction(0)]
            terms = [up + down for up, down in zip(raised, lowered, strict=True)]
            terms[0] += top
        c, b, a, q = terms
        return cls(q, a, b, c, letter)

    def at(self, p: int) -> Fraction:
        """The count for p ranks."""
        return self.q * p * p + self.a * p + self.b + self.c / p

    @property
    def order(self) -> str:
        """The fastest growing term, without its factor."""
        if self.q or self.a:
            return f"O({self.letter}{' ' if self.letter else ''}{'P^2' if self.q else 'P'})"
        return f"O({self.letter or 1})" if self.b else f"O({self.letter or 1}/P)"

    def cell(self, number: Fraction) -> str:
        """Order, formula, and the count where it depends on the ranks."""
        return f"{self.order}: {self}" + (f" = {self._times(number)}" if self.q or self.a or self.c else "")

    def __str__(self) -> str:
        if not self.q and not self.a and not self.b:
            return f"{self._times(self.c)}/P"
        parts = ((self.q, "P^2"), (self.a, "P"), (self.b, ""), (self.c, "/P"))
        terms = [f"{n}{tail}" for n, tail in parts if n]
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
    """The classic all-reduces for p ranks: parameter server, exchanges, ring."""
    if not 2 <= p <= 1_000_000:
        raise InputError(f"a table for {p} ranks", rule="from 2 to 1000000 ranks")
    rows = []
    for algorithm, name in CLASSIC.items():
        grown = zip(*(_numbers(algorithm, n) for n in _POINTS), ("", "N", "N", ""), strict=True)
        growth = tuple(Growth.through(tuple(points), letter) for *points, letter in grown)
        here = _numbers(algorithm, p) if p <= COUNTED_RANKS else tuple(one.at(p) for one in growth)
        rows.append(GrowthRow(algorithm, name, p, ScheduleCounts(int(here[0]), here[1], here[2], int(here[3])), growth))
    return rows


def _numbers(algorithm: str, p: int) -> tuple[Fraction, ...]:
    """The counts of an all-reduce of N bytes, from its schedule."""
    exchange = _EXCHANGES.get(algorithm)
    schedule = exchange(p) if exchange else collective_schedule("all_reduce", algorithm, p)
    rounds, most, whole, fan_in = counts(schedule).numbers()
    # what is gathered in whole buffers has P N bytes
    times = p if schedule.collective == "all_gather" else 1
    return rounds, most * times, whole * times, fan_in


def markdown(rows: list[GrowthRow]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADS, ("---",) * len(HEADS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
