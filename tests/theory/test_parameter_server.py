"""Parameter servers against a ring: closed forms, their replay, and where they cross."""

from __future__ import annotations

import math

import pytest

from drumline.clusters import Link
from drumline.core.errors import InputError
from drumline.theory.collective_forms import ring_all_reduce_seconds
from drumline.theory.parameter_server import (
    crossing_bytes,
    fewest_servers,
    server_exchange_seconds,
    transfer_seconds,
    workers_where_servers_win,
)
from drumline.theory.scaling import growth_table
from drumline.theory.shared_port import shared_port_ends

LINK = Link(1e-3, 1e8)
"""A slow network: messages of 100 kB take as long on the wire as to start."""


@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_server_carries_the_bytes_of_all_workers_each_way(p: int) -> None:
    m = 1e7
    assert server_exchange_seconds(p, m, LINK) == pytest.approx(2 * (1e-3 + p * 0.1))
    assert server_exchange_seconds(p, m, LINK, servers=p) == pytest.approx(2 * (1e-3 + 0.1)), (
        "as fast as a worker sends"
    )
    assert ring_all_reduce_seconds(p, m, LINK) == pytest.approx(2 * (p - 1) * 1e-3 + 2 * (p - 1) / p * 0.1)


@pytest.mark.parametrize(("p", "n"), [(4, 1), (8, 2), (8, 8), (5, 3)])
def test_one_way_is_the_end_of_messages_that_share_the_port(p: int, n: int) -> None:
    m = 1e6
    ends = shared_port_ends([0.0] * p, m / n * LINK.beta, own=m * LINK.beta)
    assert transfer_seconds(p, m, LINK, servers=n) == pytest.approx(max(ends))


def test_a_server_on_a_workers_host_saves_that_workers_messages() -> None:
    assert transfer_seconds(4, 1e6, LINK, colocated=True) == pytest.approx(3 * 0.01)
    # a server on every host: the bytes of a ring, without its rounds
    assert transfer_seconds(4, 1e6, LINK, servers=4, colocated=True) == pytest.approx(3 / 4 * 0.01)
    assert transfer_seconds(1, 1e6, LINK, colocated=True) == 0.0


def test_the_table_of_all_reduces_counts_the_same_bytes() -> None:
    """`drumline simulate all_reduce`: its server is one of the ranks, two rounds, (P - 1) N in each."""
    for p in (2, 4, 8):
        rows = {r.algorithm: r.counts for r in growth_table(p)}
        one_way = transfer_seconds(p, 1.0, Link(0.0, 1.0), colocated=True)
        assert rows["server"].rounds == 2 and float(rows["server"].round_bytes) == pytest.approx(one_way)
        ring = ring_all_reduce_seconds(p, 1.0, Link(0.0, 1.0))
        assert rows["ring"].rounds * float(rows["ring"].round_bytes) == pytest.approx(ring)


@pytest.mark.parametrize(
    ("p", "n", "colocated"), [(4, 1, False), (8, 1, False), (8, 4, False), (8, 8, False), (8, 1, True)]
)
def test_both_take_as_long_at_the_crossing(p: int, n: int, colocated: bool) -> None:
    m = crossing_bytes(p, LINK, servers=n, colocated=colocated)
    assert 0 < m < math.inf
    for size, server_wins in ((0.9 * m, True), (1.1 * m, False)):
        servers = server_exchange_seconds(p, size, LINK, servers=n, colocated=colocated)
        assert (servers < ring_all_reduce_seconds(p, size, LINK)) == server_wins
    assert server_exchange_seconds(p, m, LINK, servers=n, colocated=colocated) == pytest.approx(
        ring_all_reduce_seconds(p, m, LINK)
    )


def test_the_closed_form_of_the_crossing() -> None:
    """One server: (p-2) alpha / (beta (p - (p-1)/p))."""
    p = 8
    assert crossing_bytes(p, LINK) == pytest.approx((p - 2) * 1e-3 * 1e8 / (p - (p - 1) / p))
    assert crossing_bytes(2, LINK) == 0.0, "two workers: a ring has no more rounds than a server"
    assert crossing_bytes(4, Link(0.0, 1e8)) == 0.0, "without start-up times a ring always wins"
    assert crossing_bytes(4, LINK, servers=4, colocated=True) == math.inf, "the bytes of a ring in two rounds"


def test_workers_and_servers_at_the_crossing() -> None:
    small, large = 1e4, 1e7
    first, last = workers_where_servers_win(small, LINK) or (0, 0)
    assert first == 3 and last == 4096, "alpha > m beta: the more workers, the more rounds of a ring"
    assert workers_where_servers_win(large, LINK) is None
    between = workers_where_servers_win(2e5, LINK, servers=2)
    assert between is None or between[0] >= 2
    assert fewest_servers(8, 1e5, LINK) == next(
        n
        for n in range(1, 9)
        if server_exchange_seconds(8, 1e5, LINK, servers=n) < ring_all_reduce_seconds(8, 1e5, LINK)
    )
    assert fewest_servers(8, 1e8, LINK) is None


def test_a_faster_link_of_the_server_moves_the_crossing() -> None:
    wide = Link(1e-3, 1e9)
    assert crossing_bytes(8, LINK, server_link=wide) > 5 * crossing_bytes(8, LINK)
    assert transfer_seconds(8, 1e6, LINK, server_link=wide) == pytest.approx(0.01), "bound by the workers' own links"


def test_servers_and_ring_may_have_start_ups_and_links_of_their_own() -> None:
    """Remote calls ask and answer, a ring's messages do not: measured start-ups replace the two of the formula."""
    p, ring = 8, Link(2e-4, 9e7)
    start_up = 1.3e-3
    m = crossing_bytes(p, LINK, ring_link=ring, start_up=start_up)
    rounds = 2 * (p - 1)
    assert m == pytest.approx((rounds * ring.alpha - start_up) / (2 * p * LINK.beta - rounds / p * ring.beta))
    servers = server_exchange_seconds(p, m, LINK, start_up=start_up)
    assert servers == pytest.approx(start_up + 2 * p * m * LINK.beta)
    assert servers == pytest.approx(ring_all_reduce_seconds(p, m, ring))
    same = crossing_bytes(p, LINK, ring_link=LINK, start_up=2 * LINK.alpha)
    assert same == pytest.approx(crossing_bytes(p, LINK)), "by default both start as fast"
    assert crossing_bytes(p, LINK, ring_link=ring, start_up=rounds * ring.alpha) == 0.0, "no start-up is saved"
    slow_ring = Link(1e-4, 1e6)
    assert crossing_bytes(p, LINK, servers=p, ring_link=slow_ring, start_up=0.0) == math.inf, "fewer seconds per byte"
    assert crossing_bytes(p, LINK, servers=p, ring_link=slow_ring, start_up=1.0) == 0.0, "they win above, not below"


def test_bad_counts_are_refused() -> None:
    for p, n in ((0, 1), (2, 3), (2, 0)):
        with pytest.raises(InputError, match="1 <= servers <= workers"):
            server_exchange_seconds(p, 1.0, LINK, servers=n)
