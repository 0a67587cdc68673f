"""Direct algorithms: every rank sends to the final receiver, in few rounds of many messages.

Where a round adds several messages to one chunk, those of close ranks come first: lower ranks go before the local
operand and higher ones after it, so the operands end in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator

from .contracts import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    pair_ranges,
)
from .spec import Rounds, Schedule, Send


def server_all_reduce(p: int) -> Schedule:
    """2 rounds of p-1 messages of m bytes through one rank, the parameter server: all send to it, it answers all."""
    return Schedule("server_all_reduce", ALL_REDUCE, p, 1, Rounds(_server, (p,)), order="rank")


def naive_all_reduce(p: int) -> Schedule:
    """2(p-1) rounds of one message of m bytes: one pair at a time; the sum goes up the ranks and back."""
    return Schedule("naive_all_reduce", ALL_REDUCE, p, 1, Rounds(_naive, (p,)), order="rank")


def direct_all_reduce(p: int) -> Schedule:
    """2 rounds in which each rank sends p-1 messages of m/p bytes: every share to its owner, every sum to all."""
    return Schedule("direct_all_reduce", ALL_REDUCE, p, p, Rounds(_direct_all_reduce, (p,)), order="rank")


def direct_reduce_scatter(p: int) -> Schedule:
    """1 round in which each rank sends p-1 messages of m/p bytes: every share directly to its owner."""
    return Schedule("direct_reduce_scatter", REDUCE_SCATTER, p, p, Rounds(_to_owners, (p,)), order="rank")


def direct_all_gather(p: int) -> Schedule:
    """1 round in which each rank sends p-1 messages of m/p bytes: every share from its owner to all."""
    return Schedule("direct_all_gather", ALL_GATHER, p, p, Rounds(_from_owners, (p,)))


def flat_broadcast(p: int, root: int = 0) -> Schedule:
    """1 round: the root sends p-1 messages of m bytes."""
    return Schedule("flat_broadcast", BROADCAST, p, 1, Rounds(_flat_broadcast, (p, root)), root=root)


def flat_reduce(p: int, root: int = 0) -> Schedule:
    """1 round: the root receives p-1 messages of m bytes."""
    return Schedule("flat_reduce", REDUCE, p, 1, Rounds(_flat_reduce, (p, root)), root=root, order="rank")


def flat_gather(p: int, root: int = 0) -> Schedule:
    """1 round: the root receives p-1 messages of m/p bytes."""
    return Schedule("flat_gather", GATHER, p, p, Rounds(_flat_gather, (p, root)), root=root)


def flat_scatter(p: int, root: int = 0) -> Schedule:
    """1 round: the root sends p-1 messages of m/p bytes."""
    return Schedule("flat_scatter", SCATTER, p, p, Rounds(_flat_scatter, (p, root)), root=root)


def pairwise_all_to_all(p: int) -> Schedule:
    """p-1 rounds of p sends of m/p bytes: in round k each rank sends to the rank k+1 positions further."""
    return Schedule("pairwise_all_to_all", ALL_TO_ALL, p, p * p, Rounds(_pairwise, (p,)), split=pair_ranges)


def _near_first(p: int, rank: int) -> list[int]:
    """The other ranks by distance."""
    return sorted((r for r in range(p) if r != rank), key=lambda r: (abs(r - rank), r))


def _server(p: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(r, 0, 0, True) for r in range(1, p)]
        yield [Send(0, r, 0, False) for r in range(1, p)]


def _naive(p: int) -> Iterator[list[Send]]:
    for r in range(p - 1):
        yield [Send(r, r + 1, 0, True)]
    for r in range(p - 1, 0, -1):
        yield [Send(r, r - 1, 0, False)]


def _direct_all_reduce(p: int) -> Iterator[list[Send]]:
    yield from _to_owners(p)
    yield from _from_owners(p)


def _to_owners(p: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(src, owner, owner, True) for owner in range(p) for src in _near_first(p, owner)]


def _from_owners(p: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(r, dst, r, False) for r in range(p) for dst in _near_first(p, r)]


def _flat_broadcast(p: int, root: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(root, r, 0, False) for r in _near_first(p, root)]


def _flat_reduce(p: int, root: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(r, root, 0, True) for r in _near_first(p, root)]


def _flat_gather(p: int, root: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(r, root, r, False) for r in _near_first(p, root)]


def _flat_scatter(p: int, root: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(root, r, r, False) for r in _near_first(p, root)]


def _pairwise(p: int) -> Iterator[list[Send]]:
    for k in range(1, p):
        yield [Send(r, (r + k) % p, r * p + (r + k) % p, False) for r in range(p)]
