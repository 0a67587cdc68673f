"""Ring and chain algorithms: every rank sends to its neighbour. p ranks, m bytes, round k."""

from __future__ import annotations

from collections.abc import Iterator

from .contracts import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER
from .spec import Rounds, Schedule, Send


def ring_all_reduce(p: int) -> Schedule:
    """2(p-1) rounds of p sends of m/p bytes: reduce-scatter around the ring, then all-gather."""
    return Schedule("ring_all_reduce", ALL_REDUCE, p, p, Rounds(ring_all_reduce_rounds, (p,)))


def ring_reduce_scatter(p: int) -> Schedule:
    """p-1 rounds of p sends of m/p bytes: each chunk goes once around the ring, is summed, and ends at its owner."""
    return Schedule("ring_reduce_scatter", REDUCE_SCATTER, p, p, Rounds(ring_reduce_scatter_rounds, (p,)))


def ring_all_gather(p: int) -> Schedule:
    """p-1 rounds of p sends of m/p bytes: each chunk goes once around the ring, from its owner."""
    return Schedule("ring_all_gather", ALL_GATHER, p, p, Rounds(ring_all_gather_rounds, (p,)))


def chain_broadcast(p: int, root: int = 0) -> Schedule:
    """p-1 rounds of m bytes, from neighbour to neighbour: slow unless segmented, fast for long buffers then.

    In n segments it takes n+p-2 rounds of m/n bytes: each rank forwards one segment while it receives the next.
    """
    return Schedule("chain_broadcast", BROADCAST, p, 1, Rounds(_chain, (p, root)), root=root)


def chain_reduce(p: int, root: int = 0) -> Schedule:
    """p-1 rounds of m bytes: the chain of a broadcast backwards, also meant for segments.

    Operands are in rank order for root 0 and root p-1 only: the chain of any other root wraps around.
    """
    return Schedule("chain_reduce", REDUCE, p, 1, Rounds(_chain_back, (p, root)), root=root, order="rank")


def ring_all_reduce_rounds(p: int) -> Iterator[list[Send]]:
    """Rounds of a ring all-reduce, also used inside other algorithms."""
    yield from ring_reduce_scatter_rounds(p)
    yield from ring_all_gather_rounds(p)


def ring_reduce_scatter_rounds(p: int) -> Iterator[list[Send]]:
    """The first half of a ring all-reduce."""
    for k in range(p - 1):
        # chunk c starts at rank c+1, so that it is complete at rank c after p-1 hops
        yield [Send(r, (r + 1) % p, (r - 1 - k) % p, True) for r in range(p)]


def ring_all_gather_rounds(p: int) -> Iterator[list[Send]]:
    """The second half of a ring all-reduce."""
    for k in range(p - 1):
        yield [Send(r, (r + 1) % p, (r - k) % p, False) for r in range(p)]


def _chain(p: int, root: int) -> Iterator[list[Send]]:
    for k in range(p - 1):
        yield [Send((root + k) % p, (root + k + 1) % p, 0, False)]


def _chain_back(p: int, root: int) -> Iterator[list[Send]]:
    # to the last rank the chain goes up the numbers, to any other root down
    step = -1 if root == p - 1 else 1
    for k in range(p - 1, 0, -1):
        yield [Send((root + step * k) % p, (root + step * (k - 1)) % p, 0, True)]
