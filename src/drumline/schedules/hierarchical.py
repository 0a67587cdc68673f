"""Hierarchical all-reduce, reduce-scatter and all-gather over hosts: most bytes stay inside a host.

Where hosts have equally many ranks, all of them take part in the phase across, each with its share. Otherwise the first
rank of each host, its leader, speaks for the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.errors import InputError
from .compose import embedded, in_parallel
from .contracts import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from .rings import ring_all_gather_rounds, ring_all_reduce_rounds, ring_reduce_scatter_rounds
from .spec import Rounds, Schedule, Send
from .trees import binomial_reduce_rounds


def hierarchical_all_reduce(p: int, per_node: int | None = None) -> Schedule:
    """Over h hosts of d = per_node neighbouring ranks: 2(d-1) rounds of m/d bytes, 2(h-1) of m/(d h).

    A ring reduce-scatter inside each host; a ring all-reduce across the hosts for each share, all in parallel; a ring
    all-gather inside. Where d does not divide p, the last host is smaller: then each host reduces to its first
    rank, the leader, by a binomial tree, the leaders all-reduce around a ring, and they broadcast.
    """
    d = _host_size(p, per_node)
    if p < 1 or p % d == 0:
        return Schedule("hierarchical_all_reduce", ALL_REDUCE, p, p, Rounds(_equal, (p, d)))
    return Schedule("hierarchical_all_reduce", ALL_REDUCE, p, -(-p // d), Rounds(_unequal, (p, d)))


def hierarchical_reduce_scatter(p: int, per_node: int | None = None) -> Schedule:
    """Over h hosts of d ranks: d-1 rounds of m/d bytes inside, then h-1 of m/p bytes across.

    Inside a host, rank i sums what all ranks of number i own; a ring across the hosts sums that for each i, all in
    parallel. Where d does not divide p, leaders sum their host's buffers, a ring of leaders sums the hosts' parts, and
    each leader hands out the shares.
    """
    d = _host_size(p, per_node)
    write = _equal_scatter if p < 1 or p % d == 0 else _unequal_scatter
    return Schedule("hierarchical_reduce_scatter", REDUCE_SCATTER, p, p, Rounds(write, (p, d)))


def hierarchical_all_gather(p: int, per_node: int | None = None) -> Schedule:
    """Over h hosts of d ranks: h-1 rounds of m/p bytes across, then d-1 of m/d bytes inside: the reverse."""
    d = _host_size(p, per_node)
    write = _equal_gather if p < 1 or p % d == 0 else _unequal_gather
    return Schedule("hierarchical_all_gather", ALL_GATHER, p, p, Rounds(write, (p, d)))


def _host_size(p: int, per_node: int | None) -> int:
    d = p if per_node is None else min(per_node, p)
    if p >= 1 and d < 1:
        raise InputError(f"hosts of {per_node} ranks", rule="at least one rank on a host")
    return d


def _equal(p: int, d: int) -> Iterator[list[Send]]:
    h = p // d

    def inside(write: Iterable[list[Send]]) -> Iterator[list[Send]]:
        rounds = list(write)
        hosts = [range(host * d, host * d + d) for host in range(h)]
        return in_parallel(embedded(rounds, host, lambda share: range(share * h, share * h + h)) for host in hosts)

    def ring(share: int) -> Iterator[list[Send]]:
        return embedded(ring_all_reduce_rounds(h), range(share, p, d), lambda c: (share * h + c,))

    yield from inside(ring_reduce_scatter_rounds(d))
    yield from in_parallel(ring(share) for share in range(d))
    yield from inside(ring_all_gather_rounds(d))


def _unequal(p: int, d: int) -> Iterator[list[Send]]:
    leaders = range(0, p, d)
    everything = range(len(leaders))
    up = list(
        in_parallel(
            embedded(binomial_reduce_rounds(min(d, p - leader), 0), range(leader, p), lambda c: everything)
            for leader in leaders
        )
    )
    yield from up
    yield from embedded(ring_all_reduce_rounds(len(leaders)), leaders, lambda c: (c,))
    for sends in reversed(up):
        yield [Send(s.dst, s.src, s.chunk, False) for s in sends]


def _equal_scatter(p: int, d: int) -> Iterator[list[Send]]:
    yield from _in_hosts(ring_reduce_scatter_rounds(d), p, d)
    yield from _across_hosts(ring_reduce_scatter_rounds(p // d), p, d)


def _equal_gather(p: int, d: int) -> Iterator[list[Send]]:
    yield from _across_hosts(ring_all_gather_rounds(p // d), p, d)
    yield from _in_hosts(ring_all_gather_rounds(d), p, d)


def _in_hosts(rounds: Iterable[list[Send]], p: int, d: int) -> Iterator[list[Send]]:
    """Rounds of d ranks in every host at once; part i is what the ranks of number i own."""
    written = list(rounds)
    return in_parallel(embedded(written, range(a, a + d), lambda i: range(i, p, d)) for a in range(0, p, d))


def _across_hosts(rounds: Iterable[list[Send]], p: int, d: int) -> Iterator[list[Send]]:
    """Rounds of the ranks of one number in their hosts, for all numbers at once."""
    written = list(rounds)

    def ring(number: int) -> Iterator[list[Send]]:
        return embedded(written, range(number, p, d), lambda host: (host * d + number,))

    return in_parallel(ring(number) for number in range(d))


def _unequal_scatter(p: int, d: int) -> Iterator[list[Send]]:
    leaders = range(0, p, d)
    yield from _up(p, d)
    yield from embedded(ring_reduce_scatter_rounds(len(leaders)), leaders, lambda host: _members(host, p, d))
    yield [Send(leader, r, r, False) for i, leader in enumerate(leaders) for r in _members(i, p, d)[1:]]


def _unequal_gather(p: int, d: int) -> Iterator[list[Send]]:
    leaders = range(0, p, d)
    yield [Send(r, leader, r, False) for i, leader in enumerate(leaders) for r in _members(i, p, d)[1:]]
    yield from embedded(ring_all_gather_rounds(len(leaders)), leaders, lambda host: _members(host, p, d))
    for sends in reversed(list(_up(p, d))):
        yield [Send(s.dst, s.src, s.chunk, False) for s in sends if s.chunk != s.src]  # it has its own


def _members(host: int, p: int, d: int) -> range:
    return range(host * d, min(host * d + d, p))


def _up(p: int, d: int) -> Iterator[list[Send]]:
    """Every host sums its whole buffers at its leader, by a binomial tree."""
    return in_parallel(
        embedded(binomial_reduce_rounds(min(d, p - leader), 0), range(leader, p), lambda c: range(p))
        for leader in range(0, p, d)
    )
