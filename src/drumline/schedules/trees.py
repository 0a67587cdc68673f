"""Tree algorithms: binomial trees from any root, two binary trees at once, and the optimal tree for LogP."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..core.errors import InputError
from .contracts import ALL_REDUCE, BROADCAST, GATHER, REDUCE, SCATTER
from .rings import ring_all_gather_rounds
from .spec import Rounds, Schedule, Send

L, O, G = 6, 2, 4  # noqa: E741  # the letters of the model
"""Latency, overhead and gap of the example in the LogP paper, in cycles: the defaults of `logp_broadcast`."""


def binomial_broadcast(p: int, root: int = 0) -> Schedule:
    """ceil(log2 p) rounds of m bytes: every rank that has it sends it on, so that their number doubles each round."""
    return Schedule("binomial_broadcast", BROADCAST, p, 1, Rounds(_binomial_broadcast, (p, root)), root=root)


def binomial_reduce(p: int, root: int = 0) -> Schedule:
    """ceil(log2 p) rounds of m bytes: neighbouring blocks of ranks merge, so that their size doubles each round.

    Of two blocks the one with the root receives, else the lower one. Blocks are contiguous, so the operands stay in
    rank order for any root.
    """
    rounds = Rounds(binomial_reduce_rounds, (p, root))
    return Schedule("binomial_reduce", REDUCE, p, 1, rounds, root=root, order="rank")


def binomial_gather(p: int, root: int = 0) -> Schedule:
    """ceil(log2 p) rounds in which the root receives 1, 2, 4, ... shares of m/p bytes, counted from the root."""
    return Schedule("binomial_gather", GATHER, p, p, Rounds(_binomial_gather, (p, root)), root=root)


def binomial_scatter(p: int, root: int = 0) -> Schedule:
    """ceil(log2 p) rounds: the root sends the far half of the shares, then each rank with shares half of its own."""
    return Schedule("binomial_scatter", SCATTER, p, p, Rounds(_binomial_scatter, (p, root)), root=root)


def scatter_allgather_broadcast(p: int, root: int = 0) -> Schedule:
    """ceil(log2 p) + p-1 rounds, but only 2 (p-1)/p m bytes: a binomial scatter, then a ring all-gather."""
    rounds = Rounds(_scatter_allgather, (p, root))
    return Schedule("scatter_allgather_broadcast", BROADCAST, p, p, rounds, root=root)


def double_tree_all_reduce(p: int) -> Schedule:
    """Up and down two binary trees at once, half of the buffer each; inner ranks of one are leaves of the other.

    Every rank sends and receives about m bytes on the way up and again on the way down, in O(log p) rounds; segments
    overlap both ways. Both trees keep rank order from left to right.
    """
    return Schedule("double_tree_all_reduce", ALL_REDUCE, p, 2, Rounds(_double_tree, (p,)), order="rank")


def logp_broadcast(p: int, root: int = 0, *, latency: int = L, overhead: int = O, gap: int = G) -> Schedule:
    """The tree in which every rank with the buffer sends it on as often as LogP allows: no tree ends sooner.

    A rank sends every max(gap, overhead) cycles, and a message arrives after overhead + latency + overhead. Rounds are
    as early as the tree allows; theory/logp.py has the times. ceil(log2 p) or more rounds of m bytes.
    """
    if latency < 0 or overhead < 0 or gap < 0 or latency + overhead + gap == 0:
        raise InputError(
            f"LogP with L={latency}, o={overhead}, g={gap}", rule="whole numbers of cycles, not all of them 0"
        )
    rounds = Rounds(_logp, (p, root, latency, overhead, gap))
    return Schedule("logp_broadcast", BROADCAST, p, 1, rounds, root=root)


def _binomial_broadcast(p: int, root: int) -> Iterator[list[Send]]:
    have = 1  # ranks root, root+1, ..., root+have-1 have the buffer
    while have < p:
        yield [Send((root + r) % p, (root + r + have) % p, 0, False) for r in range(min(have, p - have))]
        have *= 2


def binomial_reduce_rounds(p: int, root: int) -> Iterator[list[Send]]:
    """Rounds of a binomial reduce, also used inside other algorithms."""

    def holder(start: int, size: int) -> int:
        return root if start <= root < start + size else start

    size = 1
    while size < p:
        sends = []
        for start in range(0, p - size, 2 * size):
            low, high = holder(start, size), holder(start + size, size)
            src, dst = (low, high) if high == root else (high, low)
            sends.append(Send(src, dst, 0, True))
        yield sends
        size *= 2


def _binomial_gather(p: int, root: int) -> Iterator[list[Send]]:
    size = 1
    while size < p:
        yield [
            Send((root + r) % p, (root + r - size) % p, (root + c) % p, False)
            for r in range(size, p, 2 * size)
            for c in range(r, min(r + size, p))
        ]
        size *= 2


def _binomial_scatter(p: int, root: int) -> Iterator[list[Send]]:
    for sends in reversed(list(_binomial_gather(p, root))):
        yield [Send(s.dst, s.src, s.chunk, False) for s in sends]


def _scatter_allgather(p: int, root: int) -> Iterator[list[Send]]:
    yield from _binomial_scatter(p, root)
    yield from ring_all_gather_rounds(p)


def _double_tree(p: int) -> Iterator[list[Send]]:
    # tree 0 has the numbers 1..p, where odd ones are leaves; tree 1 has 0..p-1, so that every rank changes its role
    ups = []
    bit = 1
    while bit <= p:
        ups.append(
            [
                Send(j - 1 + tree, up - 1 + tree, tree, True)
                for tree in (0, 1)
                for j in range(1, p + 1 - tree)
                if j & -j == bit and (up := _parent(j, bit, p - tree)) >= 1 - tree
            ]
        )
        bit *= 2
    ups = [sends for sends in ups if sends]
    yield from ups
    for sends in reversed(ups):
        yield [Send(s.dst, s.src, s.chunk, False) for s in sends]


def _parent(j: int, bit: int, last: int) -> int:
    """The parent of number j, whose lowest bit is `bit`: the nearest number with the next bit, if it exists."""
    up = (j ^ bit) | (bit << 1)
    return up if up <= last else j ^ bit


def _logp(p: int, root: int, latency: int, overhead: int, gap: int) -> Iterator[list[Send]]:
    rounds: list[list[Send]] = []
    # (time of its next send, its number counted from the root, the earliest round of that send)
    ready = [(0, 0, 0)]
    for new in range(1, p):
        now, r, k = heapq.heappop(ready)
        if k == len(rounds):
            rounds.append([])
        rounds[k].append(Send((root + r) % p, (root + new) % p, 0, False))
        heapq.heappush(ready, (now + max(gap, overhead), r, k + 1))
        heapq.heappush(ready, (now + overhead + latency + overhead, new, k + 1))
    yield from rounds
