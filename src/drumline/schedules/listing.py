"""The list of all algorithms with what they take: rounds, bytes, messages and fan-in, counted from the schedules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from .collectives import ALGORITHMS, collective_schedule


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm over p ranks."""

    collective: str
    algorithm: str
    p: int
    rounds: int
    bytes: Fraction
    """The most that one rank sends, as a share of the buffer's m bytes."""
    messages: int
    """The most that one rank sends."""
    fan_in: int
    """The most messages that one rank receives in one round."""

    def cells(self) -> tuple[str, ...]:
        """The row as text, as HEADS names it."""
        share = f"{self.bytes} m" if self.bytes not in (0, 1) else "m" if self.bytes else "0"
        return (self.collective, self.algorithm, str(self.rounds), share, str(self.messages), str(self.fan_in))


HEADS = ("collective", "algorithm", "rounds", "bytes per rank", "messages", "fan-in")


def listing(p: int, *, per_node: int | None = None) -> list[Row]:
    """Every algorithm of the table over p ranks, unsegmented, from root 0; `per_node` neighbours share a host."""
    rows = []
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            s = collective_schedule(collective, algorithm, p, per_node=per_node)
            traffic = s.traffic(s.chunks)
            share = Fraction(max(t.bytes for t in traffic), s.chunks)
            most = max(t.messages for t in traffic)
            rows.append(Row(collective, algorithm, p, s.count_rounds(), share, most, s.fan_in))
    return rows


def markdown(rows: list[Row]) -> str:
    """The rows as a table of a document."""
    lines = [HEADS, ("---", "---", "---:", "---:", "---:", "---:"), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def pasted(document: str) -> str:
    """A document with the tables between `<!-- listing p -->` and `<!-- end -->` written anew."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{markdown(listing(int(found[2])))}\n<!-- end -->"

    return re.sub(r"(<!-- listing (\d+) -->)\n.*?<!-- end -->", table, document, flags=re.DOTALL)
