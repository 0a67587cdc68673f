"""The price of `allreduce=`: that of the named algorithm, between hosts with the links of node and network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumline.clusters import Cluster, DeviceSpec, Link, Network, Node
from drumline.clusters.measured import CollectiveTable
from drumline.costs.collectives import collective_seconds, price
from drumline.costs.gradient_algorithm import RankGroup, gradient_algorithm, gradient_seconds, host_all_reduce_seconds
from drumline.costs.operator_model import OperatorCostModel
from drumline.models import zoo
from drumline.plans import Plan
from drumline.plans.engine_constants import HOST_SEGMENT_BYTES
from drumline.schedules import ALGORITHMS, SEGMENTED_ALL_REDUCES, SHARDED_HALVES, collective_schedule, segmented
from drumline.theory.alpha_beta import NodeTopology

INSIDE, WIRE = Link(2e-5, 4e9), Link(1e-4, 1.25e8)
CPU = DeviceSpec("cpu", "cpu", 8e9, 1e10, {"fp32": 5e10}, 1e-6)
HOSTS = Cluster("two hosts", CPU, Node(2, INSIDE), Network(2, WIRE))
HOST = Cluster("one host", CPU, Node(4, INSIDE))
M = 24 * 2**20
ALL = RankGroup(4, 1)


@pytest.mark.parametrize("cluster", [HOST, HOSTS], ids=["host", "hosts"])
@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
def test_a_named_algorithm_costs_what_its_schedule_costs(name: str, cluster: Cluster) -> None:
    plan = Plan(dp=4, allreduce=name)
    seconds = gradient_seconds("all_reduce", ALL, M, plan, cluster)
    if name == "hierarchical" and cluster is HOSTS:
        assert seconds == host_all_reduce_seconds(ALL, M, HOSTS)
        return
    schedule = collective_schedule("all_reduce", name, 4, per_node=4 if cluster is HOST else 2)
    if name in SEGMENTED_ALL_REDUCES:
        schedule = segmented(schedule, 64)
    links = INSIDE if cluster is HOST else NodeTopology(2, INSIDE, WIRE)
    assert seconds == pytest.approx(price(schedule, M, links), rel=1e-9)


def test_auto_is_the_backend_on_one_host_and_hierarchical_between_hosts() -> None:
    plan = Plan(dp=4)
    assert gradient_algorithm(plan, ALL, HOST) == "native"
    assert gradient_algorithm(plan, ALL, HOSTS) == "hierarchical"
    assert gradient_algorithm(replace(plan, zero=1), ALL, HOSTS) == "hierarchical"
    for other in (replace(plan, zero=3), replace(plan, compress="fp16"), replace(plan, backend="mpi")):
        assert gradient_algorithm(other, ALL, HOSTS) == "native"
    assert gradient_algorithm(Plan(dp=3), RankGroup(3, 1), HOSTS) == "native"  # hosts of two ranks and of one
    gpus = replace(HOSTS, device=replace(CPU, kind="cuda"))
    assert gradient_algorithm(plan, ALL, gpus) == "native"


def test_gloo_does_not_know_of_hosts() -> None:
    """A ring of four over two hosts: 6 rounds of m/4 cross the network; hierarchical sends 2/3 of that."""
    native = collective_seconds("all_reduce", 4, M, HOSTS)
    assert native == pytest.approx(6 * (WIRE.alpha + M / 4 * WIRE.beta), rel=1e-9)
    n = M // HOST_SEGMENT_BYTES
    across = n * 2 * (WIRE.alpha + M / n / 2 * WIRE.beta)
    ends = 2 * (INSIDE.alpha + M / n / 2 * INSIDE.beta)
    assert host_all_reduce_seconds(ALL, M, HOSTS) == pytest.approx(across + ends, rel=1e-9)
    assert native / host_all_reduce_seconds(ALL, M, HOSTS) > 1.4


def test_slow_memory_hides_the_network() -> None:
    fast = replace(HOSTS, network=Network(2, Link(1e-6, 1e11)))
    n = M // HOST_SEGMENT_BYTES
    inside = 2 * n * (INSIDE.alpha + HOST_SEGMENT_BYTES / 2 * INSIDE.beta)
    across = 2 * (1e-6 + HOST_SEGMENT_BYTES / 2 / 1e11)
    assert host_all_reduce_seconds(ALL, M, fast) == pytest.approx(inside + across, rel=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
def test_flat_shards_cost_the_two_halves(name: str) -> None:
    plan = Plan(dp=4, zero=1, allreduce=name)
    scatter, gather = (gradient_seconds(c, ALL, M, plan, HOST) for c in ("reduce_scatter", "all_gather"))
    if name in SHARDED_HALVES:
        first, second = SHARDED_HALVES[name]
        assert scatter == pytest.approx(price(collective_schedule("reduce_scatter", first, 4), M, INSIDE))
        assert gather == pytest.approx(price(collective_schedule("all_gather", second, 4), M, INSIDE))
    else:
        assert scatter == gradient_seconds("all_reduce", ALL, M, plan, HOST)
        assert gather == pytest.approx(price(collective_schedule("all_gather", "ring", 4), M, INSIDE))


def test_a_measured_table_counts() -> None:
    table = CollectiveTable("all_reduce", "gloo", 4, (1e6, 1e8), (0.5, 50.0), "ring", 1)
    measured = replace(HOST, collective=(table,))
    assert gradient_seconds("all_reduce", ALL, 1e6, Plan(dp=4, allreduce="ring"), measured) == 0.5
    assert gradient_seconds("all_reduce", ALL, 1e6, Plan(dp=4), measured) != 0.5


def test_groups_that_share_a_port() -> None:
    """Replicas two apart on hosts of four: two of a group on a host, and two groups on its port."""
    four = Cluster("two hosts of four", CPU, Node(4, INSIDE), Network(2, WIRE))
    half = Cluster("half of each", CPU, Node(2, INSIDE), Network(2, Link(WIRE.alpha, WIRE.bandwidth / 2)))
    for name in ("ring", "hierarchical", "direct"):
        plan = Plan(dp=4, allreduce=name)
        ours = gradient_seconds("all_reduce", RankGroup(4, 2), M, plan, four)
        assert ours == pytest.approx(gradient_seconds("all_reduce", ALL, M, plan, half), rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_prices_do_not_depend_on_what_was_priced_before(zero: int) -> None:
    """Messages at the end of a step are cached by all that sets them, the algorithm too."""
    profile = zoo.profile("gpt:125m")
    one = OperatorCostModel(profile, HOSTS, "fp32")
    for word in ALGORITHMS["all_reduce"]:
        plan = Plan(dp=4, zero=zero, allreduce=word)
        fresh = OperatorCostModel(profile, HOSTS, "fp32").estimate(plan)
        assert one.estimate(plan).parts == fresh.parts
