"""Algorithms in log2 p rounds: recursive doubling and halving, and Bruck's, which work for any p."""

from __future__ import annotations

from collections.abc import Iterator

from .contracts import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, pair_ranges
from .spec import Rounds, Schedule, Send


def doubling_all_reduce(p: int) -> Schedule:
    """log2 p rounds of m bytes: partners at distance 1, 2, 4, ... exchange buffers. Two more rounds if folded.

    Where p is not a power of two, pairs of neighbours fold into one rank first, and unfold at the end.
    """
    return Schedule("doubling_all_reduce", ALL_REDUCE, p, 1, Rounds(_doubling_all_reduce, (p,)), order="rank")


def halving_all_reduce(p: int) -> Schedule:
    """2 log2 p rounds, but only 2 (p-1)/p m bytes: exchange halves, then quarters, ..., and the same way back.

    Where p is not a power of two, pairs of neighbours fold into one rank first (2 more rounds and 2m bytes).
    """
    chunks = _power(p)
    return Schedule("halving_all_reduce", ALL_REDUCE, p, chunks, Rounds(_halving_all_reduce, (p,)), order="rank")


def halving_reduce_scatter(p: int) -> Schedule:
    """ceil(log2 p) rounds, (p-1)/p m bytes: ranks split into halves, and each sends the shares of the other half.

    The last rank of a larger half has no counterpart and sends to the last one of the other half. So any p works
    without folding, and only then does a rank receive two messages in a round.
    """
    return Schedule("halving_reduce_scatter", REDUCE_SCATTER, p, p, Rounds(_halving_reduce_scatter, (p,)))


def doubling_all_gather(p: int) -> Schedule:
    """ceil(log2 p) rounds, (p-1)/p m bytes: the halving reduce-scatter backwards: groups of ranks join in pairs."""
    return Schedule("doubling_all_gather", ALL_GATHER, p, p, Rounds(_doubling_all_gather, (p,)))


def bruck_all_gather(p: int) -> Schedule:
    """ceil(log2 p) rounds, (p-1)/p m bytes, one message each: send everything 1, 2, 4, ... ranks back."""
    return Schedule("bruck_all_gather", ALL_GATHER, p, p, Rounds(_bruck_all_gather, (p,)))


def bruck_all_to_all(p: int) -> Schedule:
    """ceil(log2 p) rounds of about m/2 bytes: a block takes hops of 1, 2, 4, ... ranks that add up to its distance."""
    return Schedule("bruck_all_to_all", ALL_TO_ALL, p, p * p, Rounds(_bruck_all_to_all, (p,)), split=pair_ranges)


def _power(p: int) -> int:
    """The largest power of two up to p."""
    return 1 << max(p, 1).bit_length() - 1


def _folded(p: int) -> tuple[list[Send], list[int]]:
    """Sends of chunk 0 that fold p ranks to a power of two, and the ranks that remain.

    Neighbours fold, so each remaining rank represents a range of ranks, and the ranges are in order.
    """
    extra = p - _power(p)
    fold = [Send(2 * i + 1, 2 * i, 0, True) for i in range(extra)]
    return fold, [2 * i if i < extra else i + extra for i in range(_power(p))]


def _whole(sends: list[Send], chunks: int, *, back: bool = False) -> list[Send]:
    """The sends with all chunks of the buffer; `back` reverses them to return the result."""
    if back:
        return [Send(s.dst, s.src, c, False) for s in sends for c in range(chunks)]
    return [Send(s.src, s.dst, c, True) for s in sends for c in range(chunks)]


def _doubling_all_reduce(p: int) -> Iterator[list[Send]]:
    fold, ranks = _folded(p)
    if fold:
        yield fold
    distance = 1
    while distance < len(ranks):
        yield [Send(r, ranks[v ^ distance], 0, True) for v, r in enumerate(ranks)]
        distance *= 2
    if fold:
        yield _whole(fold, 1, back=True)


def _halving_all_reduce(p: int) -> Iterator[list[Send]]:
    fold, ranks = _folded(p)
    q = len(ranks)
    if fold:
        yield _whole(fold, q)
    exchanges = []
    distance, part = 1, q  # chunks in the range that a rank still works on
    starts = [0] * q
    while distance < q:
        part //= 2
        # ranks with the bit of this distance keep the upper half of their range
        starts = [start + part * bool(v & distance) for v, start in enumerate(starts)]
        exchanges.append(
            [
                Send(r, ranks[v ^ distance], c, True)
                for v, r in enumerate(ranks)
                for c in range(starts[v ^ distance], starts[v ^ distance] + part)
            ]
        )
        distance *= 2
    yield from exchanges
    for sends in reversed(exchanges):
        yield [Send(s.dst, s.src, s.chunk, False) for s in sends]
    if fold:
        yield _whole(fold, q, back=True)


def _halving_reduce_scatter(p: int) -> Iterator[list[Send]]:
    runs = [(0, p)]
    while any(stop - start > 1 for start, stop in runs):
        sends, halves = [], []
        for start, stop in runs:
            if stop - start == 1:
                halves.append((start, stop))
                continue
            middle = (start + stop + 1) // 2
            low, high = range(start, middle), range(middle, stop)
            sends += [Send(r, high[min(i, len(high) - 1)], c, True) for i, r in enumerate(low) for c in high]
            sends += [Send(r, low[i], c, True) for i, r in enumerate(high) for c in low]
            halves += [(start, middle), (middle, stop)]
        yield sends
        runs = halves


def _doubling_all_gather(p: int) -> Iterator[list[Send]]:
    for sends in reversed(list(_halving_reduce_scatter(p))):
        yield [Send(s.dst, s.src, s.chunk, False) for s in sends]


def _bruck_all_gather(p: int) -> Iterator[list[Send]]:
    have = 1  # rank r has the chunks r, r+1, ..., r+have-1
    while have < p:
        yield [Send(r, (r - have) % p, (r + i) % p, False) for r in range(p) for i in range(min(have, p - have))]
        have *= 2


def _bruck_all_to_all(p: int) -> Iterator[list[Send]]:
    hop = 1
    while hop < p:
        # a block at distance j has taken the hops of the lower bits of j already
        yield [
            Send((src + j % hop) % p, (src + j % hop + hop) % p, src * p + (src + j) % p, False)
            for src in range(p)
            for j in range(p)
            if j & hop
        ]
        hop *= 2
