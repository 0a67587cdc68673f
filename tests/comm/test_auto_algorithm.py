"""`algorithm="auto"`: close to the best measured, close to the cheapest if nothing was measured, and fast."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import expected_results as plain
import pytest
import torch

from drumline.clusters import Cluster, CollectiveTable, DeviceSpec, Link, Network, Node
from drumline.clusters.links import RankLink
from drumline.comm import Communicator, Transport, run_threads
from drumline.comm.auto_algorithm import DEFAULT_LINK, AlgorithmChooser
from drumline.core import files
from drumline.core.errors import ClusterError, InputError
from drumline.costs.collectives import price
from drumline.schedules import ALGORITHMS, collective_schedule, prove, segmented
from drumline.theory.alpha_beta import Links

LINK = Link(2e-5, 3e9)
SIZES = tuple(8.0 * 4**k for k in range(12))
CLUSTER = Cluster("here", DeviceSpec("core", "cpu", 1e9, 1e10, {"fp32": 1e10}, 1e-6), Node(4, LINK))


def chooser(
    p: int,
    cluster: Cluster | None = None,
    links: Links | None = None,
    offers: tuple[str, ...] = (),
    per_node: int | None = None,
    transport: str = "gloo",
) -> AlgorithmChooser:
    return AlgorithmChooser(
        p, transport=transport, cluster=cluster, links=links, per_node=per_node, offers=lambda c: c in offers
    )


def curve(alpha: float, beta: float, bump: float) -> tuple[float, ...]:
    """Measured times: a line with a bump where a protocol changes."""
    return tuple(alpha + beta * m * (1 + bump * math.sin(i)) for i, m in enumerate(SIZES))


MEASURED = {
    ("ring", 1): curve(9e-5, 2e-10, 0.2),
    ("doubling", 1): curve(3e-5, 9e-10, -0.2),
    ("halving", 1): curve(4e-5, 4e-10, 0.1),
    ("ring", 4): curve(3e-4, 1e-10, 0.0),
    ("native", 1): curve(6e-5, 3e-10, 0.3),
}


def with_tables(transport: str = "gloo") -> Cluster:
    tables = [CollectiveTable("all_reduce", transport, 4, SIZES, t, a, n) for (a, n), t in MEASURED.items()]
    return dataclasses.replace(CLUSTER, collective=tuple(tables))


@pytest.mark.parametrize("offers", [(), ("all_reduce",)])
def test_the_best_measured(offers: tuple[str, ...]) -> None:
    """Exact at the measured sizes; within a tenth in between, though similar sizes share one choice."""
    cluster, auto = with_tables(), chooser(4, with_tables(), offers=offers)
    tables = [t for t in cluster.collective if t.algorithm != "native" or offers]
    for m in sorted({int(s * f) for s in SIZES for f in (1, 1.1, 1.5, 2.3, 3.9)}):
        choice = auto.choose("all_reduce", m)
        table = next(t for t in tables if (t.algorithm, t.segments) == (choice.algorithm, choice.segments))
        best = min(t.at(m) for t in tables)
        assert choice.origin == "measured"
        assert table.at(m) <= (1.0 if m in SIZES else 1.1) * best
    assert {auto.choose("all_reduce", int(m)).algorithm for m in SIZES} >= {"doubling", "ring"}


def test_tables_of_other_sizes_and_transports_are_ignored() -> None:
    for auto in (chooser(3, with_tables()), chooser(4, with_tables("shm")), chooser(4, CLUSTER)):
        assert auto.choose("all_reduce", 1000).origin == "priced"
    assert chooser(4, with_tables()).choose("all_gather", 1000).origin == "priced"


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_the_cheapest_if_nothing_was_measured(collective: str, p: int) -> None:
    """Within a tenth of the best of all algorithms and several numbers of segments."""
    auto = chooser(p, links=LINK)
    for m in (0, 8, 4096, 2**16, 2**20, 2**24):
        choice = auto.choose(collective, m)
        assert choice.origin == "priced"
        priced = price(auto.schedule(collective, choice), m, LINK)
        assert priced == pytest.approx(choice.seconds, rel=0.05)
        for algorithm in ALGORITHMS[collective]:
            for n in (1, 8) if m >= 2**20 else (1,):
                other = price(segmented(collective_schedule(collective, algorithm, p), n), m, LINK)
                assert priced <= 1.1 * other, (algorithm, n, m)


def test_only_long_messages_are_segmented() -> None:
    auto = chooser(8, links=LINK)
    assert auto.choose("broadcast", 2**26).segments > 1
    assert auto.choose("broadcast", 1024).segments == 1


def test_without_a_cluster_native_is_chosen() -> None:
    """It was made for the transport; with a cluster's numbers the price decides."""
    assert chooser(4, offers=("all_reduce",)).choose("all_reduce", 100).algorithm == "native"
    assert chooser(4).choose("all_reduce", 100).origin == "priced"
    assert chooser(4).links == DEFAULT_LINK
    assert chooser(4, CLUSTER, offers=("all_reduce",)).choose("all_reduce", 100).algorithm != "native"
    assert chooser(4, offers=("all_reduce",)).choose("all_reduce", 100, native=False).algorithm != "native"


def test_non_commutative_operators_keep_the_rank_order() -> None:
    auto = chooser(5, with_tables(), offers=("all_reduce",))
    for collective in plain.REDUCING:
        for m in (8, 2**20):
            choice = auto.choose(collective, m, in_order=True)
            assert prove(auto.schedule(collective, choice)).in_rank_order
    measured = chooser(4, with_tables(), offers=("all_reduce",)).choose("all_reduce", 8, in_order=True)
    assert (measured.algorithm, measured.origin) == ("doubling", "measured")


def test_many_nodes() -> None:
    """Slow links between fast nodes: the algorithm that avoids them, by the cluster's numbers."""
    slow = dataclasses.replace(CLUSTER, network=Network(3, Link(5e-5, 1e8)))
    assert chooser(12, slow, per_node=4).choose("all_reduce", 2**24).algorithm == "hierarchical"


def crossed(a: int, b: int) -> Link:
    """Six ranks on three switches: 0 with 3, 1 with 4, 2 with 5. Consecutive ranks are on different switches."""
    return Link(1e-6, 1e10) if a % 3 == b % 3 else Link(1e-5, 1e9)


def ring_of(auto: AlgorithmChooser, m: int, *, algorithm: str = "ring") -> list[tuple[int, int]]:
    schedule = auto.schedule("all_reduce", auto.given("all_reduce", algorithm))
    return sorted({(s.src, s.dst) for sends in schedule.rounds for s in sends})


def test_rings_are_ordered_by_the_links() -> None:
    auto = chooser(6, links=crossed)
    hops = ring_of(auto, 2**20)
    assert sum(a % 3 == b % 3 for a, b in hops) == 3
    assert sum(a % 3 == b % 3 for a, b in ring_of(chooser(6, links=LINK), 2**20)) == 0
    pairs = tuple(RankLink(a, b, crossed(a, b)) for a in range(6) for b in range(6) if a != b)
    assert ring_of(chooser(6, dataclasses.replace(CLUSTER, rank_link=pairs)), 2**20) == hops
    some = dataclasses.replace(CLUSTER, rank_link=pairs[:7])  # not every pair: the node's link is used
    assert ring_of(chooser(6, some), 2**20) == ring_of(chooser(6, links=LINK), 2**20)


def test_ordered_rings_are_correct() -> None:
    def body(transport: Transport) -> None:
        torch.set_num_threads(1)
        comm = Communicator(transport, links=crossed)
        for collective, algorithm, root in (
            ("all_reduce", "ring", 0),
            ("all_gather", "ring", 0),
            ("reduce_scatter", "ring", 0),
            ("broadcast", "chain", 4),
            ("reduce", "chain", 2),
        ):
            inputs = [plain.whole(r, plain.shape_of(collective, 7, comm.size)) for r in range(comm.size)]
            got = plain.call(comm, collective, inputs[comm.rank].clone(), root=root, algorithm=algorithm, segments=2)
            plain.same(got, plain.expected(collective, inputs, comm.rank, root))
        half = comm.split(comm.rank % 2)  # ranks 0, 2, 4 or 1, 3, 5, with their links
        assert half._chooser.links(0, 1) == crossed(comm.rank % 2, comm.rank % 2 + 2)  # type: ignore[operator]

    run_threads(body, 6)


@pytest.mark.alone
def test_choices_are_cached() -> None:
    auto = chooser(4, with_tables())
    auto.choose("all_reduce", 4096)
    count = 20_000
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            auto.choose("all_reduce", 4096)
        best = min(best, (time.perf_counter() - start) / count)
    assert best < 5e-6


def test_ranks_that_share_the_cluster_share_the_digest() -> None:
    one, other = with_tables(), dataclasses.replace(CLUSTER, node=Node(4, Link(1e-5, 3e9)))
    digests = [
        chooser(4, with_tables()).digest,
        chooser(4, one).digest,
        chooser(4, CLUSTER).digest,
        chooser(4, other).digest,
        chooser(4, CLUSTER, per_node=2).digest,
        chooser(6, links=crossed).digest,
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


def test_older_files_still_load() -> None:
    """A table without an algorithm was measured with the backend's own collective, which `plan` uses."""
    text = files.to_plain(
        dataclasses.replace(CLUSTER, collective=(CollectiveTable("all_reduce", "gloo", 4, (8.0,), (1e-4,)),))
    )
    assert set(text["collective"][0]) == {"collective", "transport", "ranks", "bytes", "seconds"}
    cluster = files.from_plain(Cluster, text, "old.toml", ClusterError)
    assert chooser(4, cluster, offers=("all_reduce",)).choose("all_reduce", 8).algorithm == "native"
    both = dataclasses.replace(cluster, collective=(*with_tables().collective, *cluster.collective))
    assert both.table("all_reduce", 4) == with_tables().collective[-1]
    assert dataclasses.replace(cluster, collective=with_tables().collective[:3]).table("all_reduce", 4) is None


def test_a_table_of_an_unknown_algorithm_is_ignored() -> None:
    strange = CollectiveTable("all_reduce", "gloo", 4, SIZES, tuple(1e-9 for _ in SIZES), "telepathy")
    cluster = dataclasses.replace(with_tables(), collective=(strange, *with_tables().collective))
    assert chooser(4, cluster).choose("all_reduce", 8).algorithm == "doubling"


def test_all_ranks_choose_alike_and_the_sum_is_correct() -> None:
    def body(transport: Transport) -> list[str]:
        comm = Communicator(transport, cluster=with_tables("threads"))
        chosen = []
        for size in (1, 100, 30_000):
            mine = torch.full((size,), float(comm.rank))
            chosen.append(str(comm.choose("all_reduce", 4 * size)))
            assert torch.equal(comm.all_reduce(mine), torch.full((size,), 6.0))
        return chosen

    choices = run_threads(body, 4)
    assert choices == [choices[0]] * 4 and len(set(choices[0])) > 1


def test_no_order_without_an_algorithm_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = chooser(3)
    none: Callable[..., list[str]] = lambda *_: []  # noqa: E731
    monkeypatch.setattr(auto, "ordered", none)
    with pytest.raises(InputError, match="no algorithm keeps the order of ranks"):
        auto.choose("all_reduce", 8, in_order=True)
