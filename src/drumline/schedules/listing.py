"""List all algorithms with their rounds, bytes, messages and fan-in, counted from the schedules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from .collectives import ALGORITHMS, collective_schedule


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """One algorithm over p ranks."""

    collective: str
    algorithm: str
    p: int
    rounds: int
    bytes: Fraction
    """Most bytes that one rank sends, as a fraction of the m bytes of the buffer."""
    messages: int
    """Most messages that one rank sends."""
    fan_in: int
    """Most messages that one rank receives in one round."""

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of HEADS."""
        share = f"{self.bytes} m" if self.bytes not in (0, 1) else "m" if self.bytes else "0"
        return (self.collective, self.algorithm, str(self.rounds), share, str(self.messages), str(self.fan_in))


HEADS = ("collective", "algorithm", "rounds", "bytes per rank", "messages", "fan-in")


def listing(p: int, *, per_node: int | None = None) -> list[AlgorithmRow]:
    """Every algorithm over p ranks, unsegmented, from root 0; `per_node` neighbours share a host."""
    rows = []
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            s = collective_schedule(collective, algorithm, p, per_node=per_node)
            traffic = s.traffic(s.chunks)
            share = Fraction(max(t.bytes for t in traffic), s.chunks)
            most = max(t.messages for t in traffic)
            rows.append(AlgorithmRow(collective, algorithm, p, s.count_rounds(), share, most, s.fan_in))
    return rows


def markdown(rows: list[AlgorithmRow]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADS, ("---", "---", "---:", "---:", "---:", "---:"), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def pasted(document: str) -> str:
    """Replace the tables between `<!-- listing p -->` and `<!-- end -->` of a document."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{markdown(listing(int(match[2])))}\n<!-- end -->"

    return re.sub(r"(<!-- listing (\d+) -->)\n.*?<!-- end -->", table, document, flags=re.DOTALL)
