"""Fair sharing of links, and the topologies of clusters."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from drumline.clusters import Cluster, Link, load
from drumline.clusters.links import RankLink
from drumline.core.errors import ClusterError, InputError
from drumline.costs.collectives import collective_seconds, price
from drumline.schedules import ALGORITHMS, Schedule, Send, collective_schedule, ring_all_reduce
from drumline.simulator import CollectiveCall, EventLoop, FairNetwork, replay, replay_on_cluster, replay_together
from drumline.simulator.network import ReplayTooLarge
from drumline.theory.alpha_beta import NodeTopology, PairTopology, Port, Topology, UniformTopology
from drumline.theory.topologies import TorusTopology, cluster_topology, topology_word

INSIDE, ACROSS = Link(3e-6, 3e11), Link(1e-5, 2e11)
A100 = load("dgx-a100")
NAMES = [(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms]


@dataclasses.dataclass(frozen=True)
class Pipes(Topology):
    """Links with a number each, of some capacity; ranks do not matter."""

    capacities: tuple[float, ...]

    def link(self, src: int, dst: int) -> Link:
        return Link(0.0, min(self.capacities))

    def capacity(self, port: Port) -> float:
        return self.capacities[port[1]]


def ends(capacities: tuple[float, ...], flows: list[tuple[float, float, tuple[int, ...]]]) -> list[float]:
    """When each flow of (start, bytes, links) has passed."""
    loop, arrived = EventLoop(), [0.0] * len(flows)
    network = FairNetwork(Pipes(capacities), loop)

    def start(i: int, size: float, links: tuple[int, ...]) -> None:
        def done() -> None:
            arrived[i] = loop.now

        network.send([("pipe", link, 0) for link in links], size, done)

    for i, (time, size, links) in enumerate(flows):
        loop.at(time, lambda i=i, size=size, links=links: start(i, size, links))  # type: ignore[misc]
    loop.run()
    return arrived


def test_flows_share_a_link_equally() -> None:
    assert ends((10.0,), [(0, 100, (0,))]) == [10]
    assert ends((10.0,), [(0, 100, (0,)), (0, 100, (0,))]) == [20, 20]
    assert ends((10.0,), [(0, 100, (0,)), (0, 50, (0,))]) == [15, 10], "the longer one speeds up at the end"
    assert ends((10.0,), [(0, 100, (0,)), (5, 100, (0,))]) == [15, 20]
    assert ends((10.0,), [(0, 0, (0,)), (3, 0, (0,))]) == [0, 3]


def test_a_flow_gets_what_others_cannot_use() -> None:
    """Link 0 carries flows a and b, link 1 b and c: b has 2, so a gets the other 8 of link 0."""
    assert ends((10.0, 4.0), [(0, 80, (0,)), (0, 20, (0, 1)), (0, 20, (1,))]) == [10, 10, 10]


def test_no_rate_can_grow_without_slowing_a_slower_one() -> None:
    """The definition, on random networks: every flow has a full link on which no other flow is faster."""
    chance = random.Random(0)
    for _ in range(30):
        capacities = tuple(chance.choice((1.0, 2.5, 4.0)) for _ in range(5))
        paths = [tuple(chance.sample(range(5), chance.randint(1, 3))) for _ in range(8)]
        loop = EventLoop()
        network = FairNetwork(Pipes(capacities), loop)
        for path in paths:
            network.send([("pipe", link, 0) for link in path], 1e9, lambda: None)
        flows: dict[int, tuple[float, float]] = {}
        loop.at(1.0, lambda network=network, flows=flows: flows.update(network.under_way()))  # type: ignore[misc]
        loop.run()
        rates = [flows[number][1] for number in sorted(flows)]
        load = [sum(rate for rate, path in zip(rates, paths, strict=True) if i in path) for i in range(5)]
        for rate, path in zip(rates, paths, strict=True):
            full = [i for i in path if load[i] >= capacities[i] * (1 - 1e-9)]
            assert any(
                rate >= max(r for r, other in zip(rates, paths, strict=True) if i in other) * (1 - 1e-9) for i in full
            )


def test_two_all_reduces_on_one_link_take_what_fair_sharing_gives() -> None:
    """Bytes take twice as long, start-ups do not; one that starts when half of the other is done ends later."""
    link, m = Link(1e-6, 1e9), 8_000_000
    ring = ring_all_reduce(8)
    alone = replay(ring, m, link).seconds
    both = replay_together([CollectiveCall(ring, m), CollectiveCall(ring, m)], link)
    startups = 14 * link.alpha
    assert both.ends == pytest.approx([startups + 2 * (alone - startups)] * 2, rel=1e-9)
    late = replay_together([CollectiveCall(ring, m), CollectiveCall(ring, m, start=2 * alone)], link)
    assert late.ends == pytest.approx([alone, 3 * alone], rel=1e-12)
    assert {s.name.split()[0] for s in both.timeline.spans} == {"#0", "#1"}


def test_all_reduces_of_two_groups_share_the_ports_of_their_nodes() -> None:
    """Group 0 is the first device of two nodes, group 1 the second."""
    nodes = NodeTopology(2, INSIDE, Link(0.0, 1e9))
    pair, m = ring_all_reduce(2), 1_000_000
    alone = replay_together([CollectiveCall(pair, m, ranks=(0, 2))], nodes)
    groups = [CollectiveCall(pair, m, ranks=(0, 2)), CollectiveCall(pair, m, ranks=(1, 3))]
    assert replay_together(groups, nodes).seconds == pytest.approx(2 * alone.seconds, rel=1e-12)
    rails = dataclasses.replace(nodes, rails=2)
    assert replay_together(groups, rails).seconds == pytest.approx(2 * alone.seconds, rel=1e-12)
    inside = [CollectiveCall(pair, m, ranks=(0, 1)), CollectiveCall(pair, m, ranks=(2, 3))]
    assert replay_together(inside, nodes).ends == pytest.approx([replay(pair, m, INSIDE).seconds] * 2, rel=1e-12)
    with pytest.raises(InputError, match=r"2 different ranks"):
        replay_together([CollectiveCall(pair, m, ranks=(1, 1))], nodes)


def test_too_many_messages_that_share_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.simulator.network.MOST_RATES", 100)
    direct = collective_schedule("all_reduce", "direct", 16)
    with pytest.raises(ReplayTooLarge, match=r"messages at a time share links(.|\n)*at most 100 rates"):
        replay(direct, 1 << 20, NodeTopology(8, INSIDE, ACROSS))


def test_use_of_links() -> None:
    whole = replay_together([CollectiveCall(ring_all_reduce(2), 10)], Link(1.0, 1.0))
    out = next(use for use in whole.link_use if use.name == "device out")
    assert (out.busy_share, out.bytes, out.utilisation) == (10 / 12, 10, 10 / 12)


def test_the_network_leaves_nothing_behind() -> None:
    """Links keep no flow that has ended."""
    loop = EventLoop()
    network = FairNetwork(UniformTopology(Link(0.0, 1.0)), loop)
    left = 2000

    def again() -> None:
        nonlocal left
        left -= 1
        if left > 0:
            network.send([("device out", left % 3, 0), ("device in", left % 2, 0)], 1.0, again)

    for _ in range(10):
        again()
    loop.run()
    assert not network.under_way() and not loop._heap


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_across_nodes_the_replay_equals_the_sum_of_its_rounds(algorithm: str) -> None:
    for nodes in (2, 3, 4):
        found = replay_on_cluster("all_reduce", algorithm, 8 * nodes, 48_000_000, A100)
        assert found.formula == "round by round"
        assert found.replay.seconds == pytest.approx(found.formula_seconds, rel=1e-9)
    plan = collective_seconds("all_reduce", 32, 48_000_000, A100.with_devices(32))
    if algorithm == "hierarchical":
        assert found.replay.seconds == pytest.approx(plan, rel=1e-9), "what `plan` says"


def test_hierarchical_beats_the_ring_by_the_ratio_of_the_links() -> None:
    """64 MB on two nodes: 30 rounds between nodes against 14 inside and 2 between, of which all devices share the port."""
    m, a, b = 64_000_000, A100.node.link, A100.network.link  # type: ignore[union-attr]
    ring = replay_on_cluster("all_reduce", "ring", 16, m, A100).replay.seconds
    levels = replay_on_cluster("all_reduce", "hierarchical", 16, m, A100).replay.seconds
    assert [ring, 900e-6] == pytest.approx([30 * (b.alpha + m / 16 * b.beta)] * 2, rel=1e-9)
    expected = 14 * (a.alpha + m / 8 * a.beta) + 2 * (b.alpha + 8 * m / 16 * b.beta)
    assert levels == pytest.approx(expected, rel=1e-9)
    assert levels == pytest.approx(755.3e-6, rel=1e-3)


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_a_collective_inside_a_node_equals_its_closed_form(collective: str, algorithm: str) -> None:
    found = replay_on_cluster(collective, algorithm, 8, 8 * 8 * 64 * 1000, A100)
    assert found.formula == "closed form"
    assert found.replay.seconds == pytest.approx(found.formula_seconds, rel=1e-9)
    assert found.where == "8 ranks on one node of dgx-a100"


def test_rails_are_used_separately() -> None:
    """One message uses one of eight ports; eight messages of eight devices use all."""
    shared, rails = NodeTopology(8, INSIDE, ACROSS), NodeTopology(8, INSIDE, ACROSS, rails=8)
    assert shared.link(0, 8) == ACROSS and rails.link(0, 8) == Link(ACROSS.alpha, ACROSS.bandwidth / 8)
    ring, levels = (collective_schedule("all_reduce", a, 16, per_node=8) for a in ("ring", "hierarchical"))
    m = 64_000_000
    assert replay(ring, m, rails).seconds > 5 * replay(ring, m, shared).seconds
    assert replay(levels, m, rails).seconds == pytest.approx(replay(levels, m, shared).seconds, rel=1e-9)


def test_oversubscribed_switches_slow_what_leaves_them() -> None:
    def seconds(dst: int, **more: float) -> float:
        topology = dataclasses.replace(NodeTopology(1, INSIDE, Link(0.0, 1.0), nodes_per_switch=2), **more)
        sends = tuple(Send(src, src + dst, 0, True) for src in range(2))
        exchange: Schedule = dataclasses.replace(ring_all_reduce(8), chunks=1, rounds=(sends,))
        assert replay(exchange, 12, topology).seconds == price(exchange, 12, topology)
        return replay(exchange, 12, topology).seconds

    assert seconds(2) == 12 == seconds(4)
    assert seconds(4, oversubscription=2.0) == 24
    inside = dataclasses.replace(NodeTopology(1, INSIDE, Link(0.0, 1.0), 1, 2), oversubscription=4.0)
    assert inside.link(0, 1).bandwidth == 1.0 and inside.link(0, 2).bandwidth == 0.5
    assert [port[0] for port in inside.path(1, 2)] == ["node out", "uplink", "downlink", "node in"]


def test_a_torus_passes_the_nodes_between() -> None:
    torus = TorusTopology((4, 4), 1, INSIDE, Link(0.0, 4.0))  # four ports of 1 byte a second
    assert torus.path(0, 1) == (("torus y+", 0, 0),)
    assert torus.path(0, 3) == (("torus y-", 0, 0),), "the shorter way round"
    assert torus.path(0, 2) == (("torus y+", 0, 0), ("torus y+", 1, 0))
    assert torus.path(0, 5) == (("torus y+", 0, 0), ("torus x+", 1, 0))
    assert torus.link(0, 10).bandwidth == 1.0
    neighbours = replay_together([CollectiveCall(ring_all_reduce(4), 8, ranks=(0, 1, 2, 3))], torus).seconds
    distant = replay_together([CollectiveCall(ring_all_reduce(4), 8, ranks=(0, 2, 1, 3))], torus).seconds
    assert neighbours == 12 and distant > 1.5 * neighbours, "two messages pass the same link"
    cube = TorusTopology((2, 3, 4), 2, INSIDE, ACROSS)
    assert len(cube.path(0, 47)) == 3 and cube.path(0, 1) == (("device out", 0, 0), ("device in", 1, 0))
    assert all(cube.path(a, b) for a, b in itertools.permutations(range(48), 2))


def with_network(**keys: object) -> Cluster:
    assert A100.network is not None
    return dataclasses.replace(A100, network=dataclasses.replace(A100.network, **keys))  # type: ignore[arg-type]


def test_the_topology_of_a_cluster() -> None:
    assert cluster_topology(A100, 8) == UniformTopology(A100.node.link)
    assert cluster_topology(A100, 16) == NodeTopology.of(A100)
    assert topology_word(A100) == "fat-tree" and topology_word(with_network(ports=0)) == "ethernet"
    assert topology_word(load("rtx4090")) == ""
    rail = cluster_topology(with_network(topology="rail"), 16)
    assert isinstance(rail, NodeTopology) and rail.rails == 8
    few = cluster_topology(with_network(topology="rail", ports=4), 16)
    assert few.path(1, 9) == (("rail out", 0, 0), ("rail in", 8, 0)), "two devices on each rail"
    torus = cluster_topology(with_network(topology="torus", shape=(4, 8)), 16)
    assert isinstance(torus, TorusTopology)
    links = [RankLink(a, b, Link(1e-6, 1e9 * (1 + a))) for a, b in itertools.permutations(range(3), 2)]
    measured = dataclasses.replace(A100, rank_link=tuple(links))
    pairs = cluster_topology(measured, 3)
    assert isinstance(pairs, PairTopology) and pairs.link(2, 0).bandwidth == 3e9
    assert cluster_topology(measured, 4) == UniformTopology(A100.node.link)
    with pytest.raises(ClusterError, match="it has 256 devices"):
        cluster_topology(A100, 512)
    with pytest.raises(ClusterError, match=r'a torus of 32 nodes in the shape 4x4(.|\n)*network.shape = "4x8"'):
        cluster_topology(with_network(topology="torus", shape=(4, 4)), 16)


def test_a_collective_takes_the_nodes_that_it_needs() -> None:
    many = replay_on_cluster("all_reduce", "hierarchical", 1024, 1 << 20, A100)
    assert many.where == "1024 ranks on 128 nodes of dgx-a100" and many.replay.kinds == 8
    one = replay_on_cluster("all_reduce", "ring", 4, 1 << 20, load("rtx4090"))
    assert one.where == "4 ranks on one node of rtx4090"
    torus = with_network(topology="torus", shape=(4, 8))
    with pytest.raises(ClusterError, match="it has 256 devices"):
        replay_on_cluster("all_reduce", "ring", 512, 1 << 20, torus)


def test_what_is_too_large_is_refused_with_the_way_out_or_priced_as_one() -> None:
    with pytest.raises(InputError, match=r"at most 500,000 messages(.|\n)*an algorithm in which all ranks do the same"):
        replay_on_cluster("all_reduce", "direct", 4096, 1 << 20, A100)
    with pytest.raises(InputError, match=r"--bytes 64012288, which 16384 ranks divide evenly"):
        replay_on_cluster("all_reduce", "ring", 16384, 64_000_000, A100)
    with pytest.raises(InputError, match=r"as many as fill all nodes"):
        replay_on_cluster("all_reduce", "ring", 16381, 16381 * 64, A100)
    with pytest.raises(InputError, match=r"at most 500,000 messages"):
        replay_on_cluster("all_reduce", "ring", 1001, 1001 * 64, A100)
    with pytest.raises(InputError, match=r"at most 500,000 messages"):
        replay_on_cluster("all_reduce", "server", 8192, 1 << 20, A100)
    one = replay_on_cluster("all_reduce", "direct", 4096, 1 << 20, load("rtx4090"))
    assert one.replay.seconds == one.formula_seconds and one.replay.priced_as_one
    assert one.counts() == "direct_all_reduce p=4096: too many messages to replay; no link is shared"
    with pytest.raises(InputError, match=r"99999 different rounds over 100000 ranks"):
        replay_on_cluster("all_to_all", "pairwise", 100_000, 800_000, A100)
