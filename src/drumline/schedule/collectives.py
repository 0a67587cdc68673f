"""Collectives, each algorithm written once as a loop over rounds. A new one is a loop, a function, a line in the table.

The letters are the theory's: p ranks, m bytes, round k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import InputError, nearest
from .spec import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Rounds, Schedule, Send


def ring_all_reduce(p: int) -> Schedule:
    """2(p-1) rounds of p sends of m/p bytes: reduce-scatter round the ring, then all-gather."""
    return Schedule("ring_all_reduce", ALL_REDUCE, p, p, Rounds(_ring_all_reduce, (p,)))


def ring_reduce_scatter(p: int) -> Schedule:
    """p-1 rounds of p sends of m/p bytes: each chunk goes once round the ring, collecting, and ends at its owner."""
    return Schedule("ring_reduce_scatter", REDUCE_SCATTER, p, p, Rounds(_ring_reduce_scatter, (p,)))


def ring_all_gather(p: int) -> Schedule:
    """p-1 rounds of p sends of m/p bytes: each chunk goes once round the ring, from its owner."""
    return Schedule("ring_all_gather", ALL_GATHER, p, p, Rounds(_ring_all_gather, (p,)))


def binomial_broadcast(p: int, root: int = 0) -> Schedule:
    """ceil(log2 p) rounds of m bytes: all who have it send it on, so that their number doubles each round."""
    return Schedule("binomial_broadcast", BROADCAST, p, 1, Rounds(_binomial_broadcast, (p, root)), root=root)


def _ring_all_reduce(p: int) -> Iterator[list[Send]]:
    yield from _ring_reduce_scatter(p)
    yield from _ring_all_gather(p)


def _ring_reduce_scatter(p: int) -> Iterator[list[Send]]:
    for k in range(p - 1):
        # Chunk c starts at rank c+1, so that after p-1 hops it stands complete at rank c.
        yield [Send(r, (r + 1) % p, (r - 1 - k) % p, True) for r in range(p)]


def _ring_all_gather(p: int) -> Iterator[list[Send]]:
    for k in range(p - 1):
        yield [Send(r, (r + 1) % p, (r - k) % p, False) for r in range(p)]


def _binomial_broadcast(p: int, root: int) -> Iterator[list[Send]]:
    have = 1  # ranks root, root+1, ..., root+have-1 hold the buffer
    while have < p:
        yield [Send((root + r) % p, (root + r + have) % p, 0, False) for r in range(min(have, p - have))]
        have *= 2


ALGORITHMS: dict[str, dict[str, Callable[[int, int], Schedule]]] = {
    "all_reduce": {"ring": lambda p, root: ring_all_reduce(p)},
    "all_gather": {"ring": lambda p, root: ring_all_gather(p)},
    "reduce_scatter": {"ring": lambda p, root: ring_reduce_scatter(p)},
    "broadcast": {"binomial": binomial_broadcast},
}
"""Collective -> algorithm -> (p, root) -> schedule. Every reader, and every test of the readers, goes by this table."""


def collective_schedule(collective: str, algorithm: str, p: int, *, root: int = 0) -> Schedule:
    """The schedule of a collective by the names of the table."""
    if collective not in ALGORITHMS:
        raise InputError(
            f"unknown collective {collective!r}", rule=f"known: {', '.join(ALGORITHMS)}",
            fix=nearest(collective, ALGORITHMS),
        )  # fmt: skip
    known = ALGORITHMS[collective]
    if algorithm not in known:
        raise InputError(
            f"unknown algorithm {algorithm!r} for {collective}", rule=f"known: {', '.join(known)}",
            fix=nearest(algorithm, known),
        )  # fmt: skip
    return known[algorithm](p, root)
