"""Symmetric schedules in short: in each round every rank sends one message of the same size, by one rule for all.

A ring of 16,384 ranks has 500 million messages, but one rule. tests/schedules/test_symmetric.py compares the rules with
the schedules, message by message.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class SymmetricRounds:
    """Equal rounds in which every rank sends one message and receives one."""

    times: int
    """Number of rounds."""
    share: Fraction
    """Bytes of a message, as a share of the buffer."""
    step: int
    """Rank r sends to r + step, cyclically, or to r xor step."""
    block: int
    """Ranks of one cycle."""
    xor: bool = False

    def partner(self, rank: int) -> int:
        """The rank that receives from this one."""
        if self.xor:
            return rank ^ self.step
        start = rank // self.block * self.block
        return start + (rank - start + self.step) % self.block

    def keeps(self, period: int, p: int) -> bool:
        """Whether the rounds stay the same if all ranks are shifted by `period` (xor: groups of that many swapped)."""
        if self.xor:
            return period & (period - 1) == 0
        return self.block == p or period % self.block == 0


def symmetric_rounds(
    collective: str, algorithm: str, p: int, per_node: int | None = None
) -> tuple[SymmetricRounds, ...] | None:
    """The rounds of a collective over p ranks, `per_node` of them on a host; None if its ranks differ."""
    if p < 2:
        return None
    key = (collective, algorithm)
    if algorithm == "ring":
        return (SymmetricRounds((2 if collective == "all_reduce" else 1) * (p - 1), Fraction(1, p), 1, p),)
    if algorithm == "hierarchical":
        return _hierarchical(collective, p, min(per_node or p, p))
    if key == ("all_to_all", "pairwise"):
        return tuple(SymmetricRounds(1, Fraction(1, p), k, p) for k in range(1, p))
    if key in _CYCLIC_DOUBLING:
        return _cyclic_doubling(collective, p)
    if p & (p - 1) == 0 and key in _EXCHANGES:
        return _exchanges(collective, algorithm, p)
    return None


_CYCLIC_DOUBLING = (("all_gather", "bruck"), ("all_to_all", "bruck"), ("barrier", "dissemination"))
_EXCHANGES = (
    ("all_reduce", "halving"),
    ("all_reduce", "doubling"),
    ("all_gather", "doubling"),
    ("reduce_scatter", "halving"),
)


def _hierarchical(collective: str, p: int, d: int) -> tuple[SymmetricRounds, ...] | None:
    """Over hosts of d ranks, which must be full: a ring of the ranks of a host, one across hosts."""
    if p % d:
        return None
    h = p // d
    inside = SymmetricRounds(d - 1, Fraction(1, d), 1, d)
    across = SymmetricRounds((2 if collective == "all_reduce" else 1) * (h - 1), Fraction(1, p), d, p)
    phases = {
        "all_reduce": (inside, across, inside),
        "reduce_scatter": (inside, across),
        "all_gather": (across, inside),
    }
    return tuple(phase for phase in phases[collective] if phase.times)


def _cyclic_doubling(collective: str, p: int) -> tuple[SymmetricRounds, ...]:
    """To ranks 1, 2, 4, ... further on, or back."""
    hops = [1 << k for k in range((p - 1).bit_length())]
    if collective == "all_gather":
        return tuple(SymmetricRounds(1, Fraction(min(hop, p - hop), p), -hop % p, p) for hop in hops)
    if collective == "all_to_all":
        blocks = [sum(1 for j in range(p) if j & hop) for hop in hops]
        return tuple(SymmetricRounds(1, Fraction(n, p), hop, p) for hop, n in zip(hops, blocks, strict=True))
    return tuple(SymmetricRounds(1, Fraction(0), hop, p) for hop in hops)


def _exchanges(collective: str, algorithm: str, p: int) -> tuple[SymmetricRounds, ...]:
    """Between partners 1, 2, 4, ... apart, of p ranks, a power of two."""
    distances = [1 << k for k in range(p.bit_length() - 1)]
    if (collective, algorithm) == ("all_reduce", "doubling"):
        return tuple(SymmetricRounds(1, Fraction(1), distance, p, xor=True) for distance in distances)
    if collective == "all_reduce":
        halves = [SymmetricRounds(1, Fraction(1, 2 * distance), distance, p, xor=True) for distance in distances]
        return (*halves, *reversed(halves))
    halves = [SymmetricRounds(1, Fraction(distance, p), distance, p, xor=True) for distance in reversed(distances)]
    return tuple(halves) if algorithm == "halving" else tuple(reversed(halves))
