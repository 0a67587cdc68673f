"""Hierarchical all-reduce over hosts: most bytes stay inside a host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.errors import InputError
from .compose import embedded, in_parallel
from .contracts import ALL_REDUCE
from .rings import ring_all_gather_rounds, ring_all_reduce_rounds, ring_reduce_scatter_rounds
from .spec import Rounds, Schedule, Send
from .trees import binomial_reduce_rounds


def hierarchical_all_reduce(p: int, per_node: int | None = None) -> Schedule:
    """Over h hosts of d = per_node neighbouring ranks: 2(d-1) rounds of m/d bytes, 2(h-1) of m/(d h).

    A ring reduce-scatter inside each host; a ring all-reduce across the hosts for each share, all in parallel; a ring
    all-gather inside. Where d does not divide p, the last host is smaller: then each host reduces to its first
    rank, the leader, by a binomial tree, the leaders all-reduce around a ring, and they broadcast.
    """
    d = p if per_node is None else min(per_node, p)
    if p >= 1 and d < 1:
        raise InputError(f"hosts of {per_node} ranks", rule="at least one rank on a host")
    if p < 1 or p % d == 0:
        return Schedule("hierarchical_all_reduce", ALL_REDUCE, p, p, Rounds(_equal, (p, d)))
    return Schedule("hierarchical_all_reduce", ALL_REDUCE, p, -(-p // d), Rounds(_unequal, (p, d)))


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
