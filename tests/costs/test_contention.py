"""Contention on networks with less than full bisection bandwidth: by hand, against the replay, and inside a step."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

import drumline as dl
from drumline.clusters import Cluster, load
from drumline.costs import OperatorCostModel, cost_model
from drumline.costs.collectives import collective_seconds, exchange_seconds, group_topology, slowest_hop
from drumline.costs.contention import NO_CONTENTION, PATTERNS, cluster_contention
from drumline.costs.gradient_algorithm import RankGroup, named_seconds
from drumline.models import zoo
from drumline.plans import Plan
from drumline.schedules import collective_schedule
from drumline.simulator import CollectiveCall, replay_together
from drumline.theory.alpha_beta import NodeTopology, Port, schedule_seconds
from drumline.theory.topologies import TorusTopology, cluster_topology

H100 = load("dgx-h100")
GPT = ("gpt:13b", "dp=8,tp=8,micro=16,recompute=full,precision=bf16", "dgx-h100")
EIGHT_TO_ONE = ["network.nodes_per_switch=2", "network.oversubscription=8"]


def machines(nodes: int = 8, **network: object) -> Cluster:
    assert H100.network is not None
    return dataclasses.replace(H100, network=dataclasses.replace(H100.network, nodes=nodes, **network))  # type: ignore[arg-type]  # by name


def oversubscribed(nodes: int, under: int, ratio: float) -> Cluster:
    return machines(nodes, nodes_per_switch=under, oversubscription=ratio)


TORUS, RAIL = machines(topology="torus", shape=(2, 4)), machines(topology="rail", ports=8)
LIMITED = [oversubscribed(8, 2, 8), oversubscribed(8, 4, 3), TORUS, RAIL]


@pytest.mark.parametrize(
    ("cluster", "ranks", "stride", "pattern", "factor"),
    [
        # one edge of a ring over all nodes leaves each switch; its uplink has the bandwidth of 2/8 of a node
        (oversubscribed(8, 2, 8), 8, 8, "across", 4),
        (oversubscribed(8, 4, 8), 8, 8, "across", 2),
        (oversubscribed(8, 4, 2), 8, 8, "across", 1),
        (oversubscribed(8, 8, 8), 8, 8, "across", 1),
        (oversubscribed(8, 4, 8), 16, 2, "across", 1),  # a group is under one switch
        (oversubscribed(8, 4, 8), 2, 32, "next", 8),  # all four nodes under a switch send to the others
        (oversubscribed(8, 4, 8), 4, 16, "next", 4),  # two of them do
        # four of a node's seven partners are under the other switch: four times 4/7 of what it sends, over half a node
        (oversubscribed(8, 4, 8), 8, 8, "all", 4 * (4 / 7) / 0.5),
        (TORUS, 8, 8, "across", 4),  # one of four ports
        (RAIL, 8, 8, "across", 1),  # device i of every node is on port i
        (RAIL, 2, 32, "next", 1),
        (RAIL, 16, 1, "next", 8),  # a single message leaves a node, by one port of eight, and changes rails
        (machines(topology="ethernet"), 64, 1, "across", 1),
        (machines(), 16, 1, "next", 1),
    ],
)
def test_flows_on_the_busiest_link(cluster: Cluster, ranks: int, stride: int, pattern: str, factor: float) -> None:
    assert cluster_contention(cluster, ranks, stride, pattern).factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "cluster",
    [
        *LIMITED,
        machines(30, topology="torus", shape=(2, 5, 3)),
        machines(6, topology="rail", ports=3, nodes_per_switch=2, oversubscription=2.5),
    ],
    ids=lambda c: str(c.network),
)
def test_flows_are_on_the_links_that_the_topology_names(cluster: Cluster, pattern: str) -> None:
    """Message by message, by `Topology.shared`."""
    assert cluster.network is not None
    for ranks, stride in [(cluster.devices, 1), (16, 1), (2, 8), (3, 8), (8, 2), (2, 24), (4, 3)]:
        block, nodes = ranks * stride, cluster.network.nodes
        world = cluster.devices // block * block
        topology = cluster_topology(cluster, cluster.devices)
        assert isinstance(topology, NodeTopology | TorusTopology)
        loads: Counter[Port] = Counter()
        left: Counter[int] = Counter()
        for src in range(world):
            hop = {"next": stride, "across": -(-8 // stride) * stride}.get(pattern)
            for step in range(stride, block, stride) if hop is None else (hop,):
                dst = src // block * block + (src % block + step) % block
                left[src // 8] += src // 8 != dst // 8
                loads.update(topology.shared(src, dst))
        busiest = max((n / topology.capacity(port) for port, n in loads.items()), default=0.0)
        expected = busiest * cluster.network.link.bandwidth / max(left.values()) if loads else 1.0
        assert cluster_contention(cluster, ranks, stride, pattern).factor == pytest.approx(expected, rel=1e-9), nodes


def together(collective: str, algorithm: str, m: int, cluster: Cluster, ranks: int, stride: int) -> float:
    """Seconds of all groups of a cluster, replayed at the same time on its links."""
    per_node = max(1, cluster.node.devices // stride)
    schedule = collective_schedule(collective, algorithm, ranks, per_node=per_node)
    block = ranks * stride
    starts = [start + i for start in range(0, cluster.devices, block) for i in range(stride)]
    calls = [CollectiveCall(schedule, m, ranks=range(start, start + block, stride)) for start in starts]
    return replay_together(calls, cluster_topology(cluster, cluster.devices)).seconds


@pytest.mark.parametrize("cluster", LIMITED, ids=lambda c: c.network.topology or c.network.nodes_per_switch)
@pytest.mark.parametrize(("ranks", "stride"), [(8, 8), (32, 2), (64, 1), (4, 16)])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_price_of_groups_that_communicate_at_once_is_their_replay(
    cluster: Cluster, ranks: int, stride: int, collective: str
) -> None:
    cluster = dataclasses.replace(cluster, node=dataclasses.replace(cluster.node, in_switch_reduction=False))
    m = 64 * 1_000_000
    replayed = together(collective, "hierarchical", m, cluster, ranks, stride)
    assert collective_seconds(collective, ranks, m, cluster, stride=stride) == pytest.approx(replayed, rel=1e-9)


@pytest.mark.parametrize("cluster", LIMITED, ids=lambda c: c.network.topology or c.network.nodes_per_switch)
@pytest.mark.parametrize(("collective", "algorithm"), [("all_reduce", "ring"), ("all_gather", "bruck")])
def test_named_algorithms_are_priced_on_the_links_of_all_groups(
    cluster: Cluster, collective: str, algorithm: str
) -> None:
    """Each round waits for its busiest link; the replay may run ahead of that, and never behind."""
    ranks, stride, m = 16, 4, 16_000_000
    topology, per_node = group_topology(cluster, ranks, stride)
    schedule = collective_schedule(collective, algorithm, ranks, per_node=per_node)
    priced = named_seconds(collective, algorithm, RankGroup(ranks, stride), m, cluster)
    assert priced == pytest.approx(schedule_seconds(schedule, schedule.sizes(m), topology), rel=1e-9)
    replayed = together(collective, algorithm, m, cluster, ranks, stride)
    assert replayed <= priced * (1 + 1e-9)
    if algorithm == "ring" and cluster not in (TORUS, RAIL):
        assert replayed == pytest.approx(priced, rel=1e-9)


def test_the_step_of_gpt_13b_is_that_of_its_network() -> None:
    """64 MB or more of gradients, between nodes alone: at 8:1 under every two nodes, as on a quarter of the network."""
    usual = dl.simulate(*GPT)
    for topology in ("fat-tree", "ethernet", "rail"):
        same = dl.simulate(*GPT, changes=[f"network.topology={topology}"])
        assert same.step_seconds == usual.step_seconds and same.estimate is not None
        assert not any("bisection" in note for note in same.estimate.notes)
    shared = dl.simulate(*GPT, changes=EIGHT_TO_ONE)
    quarter = dl.simulate(*GPT, changes=["network.link.bandwidth=100GB/s"])
    assert shared.step_seconds > usual.step_seconds
    assert shared.step_seconds == pytest.approx(quarter.step_seconds, rel=1e-9)
    assert shared.step_seconds == shared.planned_seconds and shared.estimate is not None
    (note,) = [note for note in shared.estimate.notes if "bisection" in note]
    assert note == "gradients share the uplinks of switches: 4x as long between nodes as at full bisection bandwidth"


def test_all_reduces_of_a_step_share_its_links_fairly() -> None:
    """Eight gradient all-reduces at once on the uplinks of two switches: the seconds of a bucket are their replay."""
    cluster, plan = oversubscribed(4, 2, 8), Plan.parse("dp=4,tp=8,precision=bf16")
    step = OperatorCostModel(zoo.profile("gpt:1.3b", batch_size=32), cluster, "bf16").step(plan)
    bucket = next(m for part in step.tails[0] for m in part.messages if m.collective == "all_reduce")
    m = 4 * round(bucket.bytes / 4)
    replayed = together("all_reduce", "hierarchical", m, cluster, 4, 8)
    assert bucket.seconds == pytest.approx(replayed, rel=1e-6), "up to the rounding of bytes"
    assert H100.network is not None
    alone = H100.network.link.bandwidth
    assert bucket.seconds == pytest.approx(6 * (H100.network.link.alpha + 8 * 4 * m / 4 / alone), rel=1e-6)


def test_both_cost_models_and_every_axis_know_the_links() -> None:
    cluster, profile = oversubscribed(8, 4, 8), zoo.profile("gpt:7b", batch_size=64)
    for text in (
        "dp=8,tp=8",
        "pp=2,dp=4,tp=8,micro=8",
        "dp=64,zero=3",
        "dp=32,cp=2",
        "tp=16,dp=4",
        "dp=64,zero=1,shard=16",
    ):
        plan = Plan.parse(f"{text},precision=bf16")
        for model in (cost_model, OperatorCostModel):
            limited = model(profile, cluster, "bf16").estimate(plan)
            free = model(profile, machines(), "bf16").estimate(plan)
            assert limited.step_seconds >= free.step_seconds
            noted = any("bisection" in note for note in limited.notes)
            assert noted == (limited.step_seconds > free.step_seconds) and not any("bisection" in n for n in free.notes)
    assert slowest_hop(2, 32, cluster).bandwidth == pytest.approx(slowest_hop(2, 32, machines()).bandwidth / 8)
    # of 8 MB a rank sends 1 MB to each of seven nodes, four of them past the uplink, which has half a node's bandwidth
    exchange = 7 * 10e-6 + 4 * 8 * 4e6 / (400e9 / 2)
    assert exchange_seconds(8, 8e6, cluster, stride=8) == pytest.approx(exchange, rel=1e-9)


def test_16384_ranks_whose_stages_are_under_different_switches() -> None:
    shared = oversubscribed(2048, 16, 8)
    assert cluster_contention(shared, 16, 1024, "next").factor == pytest.approx(8)
    assert cluster_contention(shared, 128, 8, "across") == NO_CONTENTION


def test_a_part_of_a_torus_is_a_torus() -> None:
    for devices, shape in ((64, (2, 4)), (32, (1, 4)), (16, (1, 2)), (24, (3, 1)), (128, (4, 4))):
        part = TORUS.with_devices(devices)
        assert part.network is not None and part.network.shape == shape
        assert cluster_contention(part, devices // 8, 8, "across").factor == pytest.approx(4)
