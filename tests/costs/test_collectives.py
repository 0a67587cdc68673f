"""Closed forms against prices of schedules, and the choice between tables, one level and two."""

from __future__ import annotations

import dataclasses
import math

import pytest

from drumline.clusters import Cluster, CollectiveTable, DeviceSpec, Link, Network, Node
from drumline.core.errors import ClusterError, InputError
from drumline.costs.collectives import CLOSED_FORMS, DEFAULTS, TWO_LEVELS, collective_seconds, price
from drumline.schedules import (
    ALGORITHMS,
    ALL_REDUCE,
    Schedule,
    Send,
    chain_broadcast,
    collective_schedule,
    prove,
    ring_all_reduce,
    segmented,
)
from drumline.theory.alpha_beta import NodeTopology
from drumline.theory.collective_forms import ring_all_reduce_seconds, switch_all_reduce_seconds

INSIDE, ACROSS = Link(2e-6, 2e11), Link(1e-5, 2.5e10)
DEVICE = DeviceSpec("toy", "cuda", 1e9, 1e12, {"fp32": 1e13}, 1e-6)
NODE = Cluster("one node", DEVICE, Node(4, INSIDE))
NODES = Cluster("three nodes", DEVICE, Node(4, INSIDE), Network(3, ACROSS))
M = 12_000_000


@pytest.mark.parametrize("p", [*range(1, 18), 33, 40])
@pytest.mark.parametrize(("collective", "algorithm"), CLOSED_FORMS)
def test_closed_forms_equal_the_price_of_the_schedule(collective: str, algorithm: str, p: int) -> None:
    for root in {0, p // 2}:
        schedule = collective_schedule(collective, algorithm, p, root=root)
        for m in (0, schedule.chunks, 1680 * schedule.chunks):
            closed = CLOSED_FORMS[collective, algorithm](p, m, INSIDE)
            assert price(schedule, m, INSIDE) == pytest.approx(closed, rel=1e-12, abs=0)


def test_every_algorithm_has_a_closed_form_and_every_collective_a_default() -> None:
    assert set(CLOSED_FORMS) == {(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms}
    assert set(DEFAULTS.items()) <= set(CLOSED_FORMS)
    assert set(TWO_LEVELS) == set(DEFAULTS)


def test_hand_computed_formulas() -> None:
    assert ring_all_reduce_seconds(4, 100, Link(1, 1)) == 2 * 3 * (1 + 25)
    assert CLOSED_FORMS["all_gather", "ring"](4, 100, Link(1, 1)) == 3 * (1 + 25)
    assert CLOSED_FORMS["broadcast", "binomial"](5, 100, Link(1, 1)) == 3 * (1 + 100)
    assert CLOSED_FORMS["all_reduce", "doubling"](8, 100, Link(1, 1)) == 3 * (1 + 100)
    assert CLOSED_FORMS["all_reduce", "doubling"](9, 100, Link(1, 1)) == 5 * (1 + 100)
    assert CLOSED_FORMS["all_reduce", "halving"](4, 100, Link(1, 1)) == 2 * (2 + 75)
    assert CLOSED_FORMS["all_reduce", "double_tree"](4, 100, Link(1, 1)) == 2 * (2 + 1) * (1 + 50)
    assert CLOSED_FORMS["reduce_scatter", "halving"](3, 99, Link(1, 1)) == 2 * (1 + 33) + (1 + 33)
    assert CLOSED_FORMS["all_to_all", "bruck"](4, 100, Link(1, 1)) == 2 + (1 + 1 + 2) * 25
    assert CLOSED_FORMS["barrier", "central"](4, 100, Link(1, 1)) == 6
    assert CLOSED_FORMS["gather", "flat"](4, 100, Link(1, 1)) == 3 * (1 + 25)


def test_a_chain_in_segments() -> None:
    """n + p - 2 rounds of m/n bytes."""
    for p, n in ((2, 4), (5, 2), (5, 16), (9, 8)):
        seconds = price(segmented(chain_broadcast(p), n), 16 * 1000, INSIDE)
        assert seconds == pytest.approx((n + p - 2) * (INSIDE.alpha + 16 * 1000 / n * INSIDE.beta), rel=1e-12)


@pytest.mark.parametrize(("devices", "nodes"), [(2, 2), (4, 3), (3, 4), (1, 5)])
def test_hierarchical_schedules_equal_two_levels(devices: int, nodes: int) -> None:
    cluster = Cluster("hosts", DEVICE, Node(devices, INSIDE), Network(nodes, ACROSS))
    schedule = collective_schedule("all_reduce", "hierarchical", devices * nodes, per_node=devices)
    closed = collective_seconds("all_reduce", devices * nodes, M, cluster)
    assert price(schedule, M, NodeTopology.of(cluster)) == pytest.approx(closed, rel=1e-12)
    if devices > 1:
        assert closed < price(ring_all_reduce(devices * nodes), M, NodeTopology.of(cluster))


def test_elements_are_not_split() -> None:
    """Twelve bytes over five ranks: three elements of four bytes, so the longest chunk is four bytes and not 12/5."""
    assert price(ring_all_reduce(5), 12, Link(0, 1), itemsize=4) == 8 * 4
    with pytest.raises(InputError, match="a multiple of the 8 bytes"):
        price(ring_all_reduce(5), 12, INSIDE, itemsize=8)


@pytest.mark.parametrize("collective", DEFAULTS)
def test_one_level_inside_a_node(collective: str) -> None:
    expected = CLOSED_FORMS[collective, DEFAULTS[collective]](4, M, INSIDE)
    assert collective_seconds(collective, 4, M, NODE) == expected
    assert collective_seconds(collective, 4, M, NODES) == expected
    assert collective_seconds(collective, 1, M, NODE) == 0


def test_a_measured_table_has_precedence() -> None:
    table = CollectiveTable("all_reduce", "nccl", 4, (1e6, 1e7), (1.0, 10.0))
    cluster = dataclasses.replace(NODE, collective=(table,))
    assert collective_seconds("all_reduce", 4, 1e6, cluster) == 1.0
    assert collective_seconds("all_reduce", 4, 2e7, cluster) == 20.0
    assert collective_seconds("all_reduce", 2, 1e6, cluster) == collective_seconds("all_reduce", 2, 1e6, NODE)


def test_hand_computed_two_levels() -> None:
    a, b = INSIDE.alpha, INSIDE.beta
    c, d = ACROSS.alpha, ACROSS.beta
    gather = 2 * (c + M / 3 * d) + 3 * (a + M / 4 * b)
    assert collective_seconds("all_gather", 12, M, NODES) == pytest.approx(gather, rel=1e-12)
    assert collective_seconds("reduce_scatter", 12, M, NODES) == pytest.approx(gather, rel=1e-12)
    assert collective_seconds("all_reduce", 12, M, NODES) == pytest.approx(2 * gather, rel=1e-12)
    broadcast = 2 * (c + M * d) + 2 * (a + M * b)
    assert collective_seconds("broadcast", 12, M, NODES) == pytest.approx(broadcast, rel=1e-12)
    assert collective_seconds("all_reduce", 9, M, NODES) == collective_seconds("all_reduce", 12, M, NODES)


def test_two_levels_equal_the_price_of_such_a_schedule_on_shared_ports() -> None:
    """Two nodes of two: reduce-scatter inside, exchange across on both rails at once, all-gather inside."""
    rounds = (
        (Send(0, 1, 1, True), Send(1, 0, 0, True), Send(2, 3, 1, True), Send(3, 2, 0, True)),
        (Send(0, 2, 0, True), Send(2, 0, 0, True), Send(1, 3, 1, True), Send(3, 1, 1, True)),
        (Send(0, 1, 0, False), Send(1, 0, 1, False), Send(2, 3, 0, False), Send(3, 2, 1, False)),
    )
    schedule = Schedule("by hand", ALL_REDUCE, 4, 2, rounds)
    prove(schedule)
    inside = 2 * (INSIDE.alpha + M / 2 * INSIDE.beta)
    across = ACROSS.alpha + M * ACROSS.beta  # one exchange of whole shares, where a ring has two rounds of halves
    nodes = NodeTopology(2, INSIDE, ACROSS)
    assert price(schedule, M, nodes) == pytest.approx(inside + across, rel=1e-12)
    cluster = Cluster("2 x 2", DEVICE, Node(2, INSIDE), Network(2, ACROSS))
    closed = collective_seconds("all_reduce", 4, M, cluster)
    assert closed == pytest.approx(price(schedule, M, nodes) + ACROSS.alpha, rel=1e-12)
    assert NodeTopology.of(cluster) == nodes
    assert NodeTopology.of(NODE).link(0, 5) == INSIDE


def test_a_faster_network_never_costs_more() -> None:
    fast = dataclasses.replace(NODES, network=Network(3, Link(ACROSS.alpha, 2 * ACROSS.bandwidth)))
    for collective in DEFAULTS:
        slow_time, fast_time = (collective_seconds(collective, 12, M, c) for c in (NODES, fast))
        assert 0 < fast_time < slow_time < math.inf


def test_wrong_calls() -> None:
    with pytest.raises(InputError, match=r"unknown collective 'all_reduc'(.|\n)*Did you mean 'all_reduce'\?"):
        collective_seconds("all_reduc", 4, M, NODE)
    with pytest.raises(ClusterError, match=r"8 ranks on one node, which is one node of 4(.|\n)*\[network\]"):
        collective_seconds("all_reduce", 8, M, NODE)
    with pytest.raises(ClusterError, match=r"13 ranks on three nodes\n.*12 devices\n.*network.nodes = 4"):
        collective_seconds("all_reduce", 13, M, NODES)
    with pytest.raises(InputError, match="ranks >= 1"):
        collective_seconds("all_reduce", 0, M, NODE)


def test_a_switch_that_reduces() -> None:
    """2 alpha + (p+1)/p m beta inside a node, where the ring would be longer; nothing else changes."""
    node = dataclasses.replace(NODE, node=dataclasses.replace(NODE.node, in_switch_reduction=True))
    assert collective_seconds("all_reduce", 4, M, node) == pytest.approx(2 * INSIDE.alpha + 1.25 * M * INSIDE.beta)
    assert collective_seconds("all_reduce", 4, M, node) < collective_seconds("all_reduce", 4, M, NODE)
    two = collective_seconds("all_reduce", 2, M, node)  # two ranks send as much without it, and 3/2 with it
    assert two == collective_seconds("all_reduce", 2, M, NODE)
    assert collective_seconds("all_gather", 4, M, node) == collective_seconds("all_gather", 4, M, NODE)
    assert switch_all_reduce_seconds(1, M, INSIDE) == 0


def test_groups_over_nodes_are_scaled_to_the_measurement_of_all_ranks() -> None:
    """gloo sends a reduce-scatter as an all-reduce: a measurement of all ranks shows it, and other groups follow."""
    plain = collective_seconds("reduce_scatter", 12, M, NODES)
    table = CollectiveTable("reduce_scatter", "gloo", 12, (1.0, float(M)), (1e-9, 3 * plain))
    measured = dataclasses.replace(NODES, collective=(table,))
    for ranks, stride in ((3, 4), (6, 2)):
        usual = collective_seconds("reduce_scatter", ranks, M, NODES, stride=stride)
        assert collective_seconds("reduce_scatter", ranks, M, measured, stride=stride) == pytest.approx(3 * usual)
        other = collective_seconds("all_gather", ranks, M, NODES, stride=stride)
        assert collective_seconds("all_gather", ranks, M, measured, stride=stride) == other
    inside = collective_seconds("reduce_scatter", 4, M, NODES)
    assert collective_seconds("reduce_scatter", 4, M, measured) == inside
