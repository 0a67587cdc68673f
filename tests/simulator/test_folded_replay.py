"""Folded replays: exactly the plain replay, at a cost that does not grow with the ranks."""

from __future__ import annotations

import pytest

from drumline.clusters import Link, load
from drumline.schedules import ALGORITHMS, collective_schedule
from drumline.schedules.symmetric import symmetric_rounds
from drumline.simulator import CollectiveCall, replay_on_cluster, replay_together
from drumline.simulator.folded_replay import can_fold, price_rounds, replay_folded
from drumline.theory.alpha_beta import NodeTopology, Topology, UniformTopology, schedule_seconds
from drumline.theory.topologies import TorusTopology

A, B = Link(3e-6, 3e11), Link(1e-5, 2e11)
NAMES = [(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms]
TOPOLOGIES = {
    "one link": UniformTopology(A),
    "nodes": NodeTopology(4, A, B),
    "nodes that are faster outside": NodeTopology(4, B, A),
    "nodes of three": NodeTopology(3, A, B),
    "rails": NodeTopology(4, A, B, rails=4),
    "two devices a rail, oversubscribed": NodeTopology(4, A, B, rails=2, nodes_per_switch=2, oversubscription=3.0),
    "torus": TorusTopology((4, 4), 1, A, B),
    "torus of nodes": TorusTopology((3, 2), 4, A, B),
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_the_folded_replay_equals_the_plain_one(topology: Topology) -> None:
    compared = 0
    per_node = getattr(topology, "devices", 4)
    for collective, algorithm in NAMES:
        for p in (12, 16, 24, 32):
            rounds = symmetric_rounds(collective, algorithm, p, per_node)
            for m in (96 * 1024, 9 << 22):
                if rounds is None or not can_fold(rounds, p, m, topology):
                    continue
                compared += 1
                schedule = collective_schedule(collective, algorithm, p, per_node=per_node)
                plain = replay_together([CollectiveCall(schedule, m)], topology)
                folded = replay_folded(rounds, p, m, topology)
                assert folded.seconds == pytest.approx(plain.seconds, rel=1e-12)
                assert folded.timeline.seconds == pytest.approx(plain.seconds, rel=1e-12)
                for one, other in zip(folded.link_use, plain.link_use, strict=True):
                    assert one.name == other.name and one.bytes == pytest.approx(other.bytes, rel=1e-12)
                    assert one.utilisation == pytest.approx(other.utilisation, rel=1e-9)
                    assert one.busy_share == pytest.approx(other.busy_share, rel=1e-9)
                priced = schedule_seconds(schedule, schedule.sizes(m), topology)
                assert price_rounds(rounds, p, m, topology) == pytest.approx(priced, rel=1e-12)
    assert compared >= 10


def test_bytes_of_the_spans_are_those_that_were_sent() -> None:
    """What repeats is one span with all of its bytes."""
    rounds = symmetric_rounds("all_reduce", "ring", 64)
    assert rounds is not None
    folded = replay_folded(rounds, 64, 64 * 1000, NodeTopology(4, A, B))
    assert folded.kinds == 4 and {s.rank for s in folded.timeline.spans} == {0, 1, 2, 3}
    for rank in range(4):
        assert sum(s.bytes for s in folded.timeline.spans if s.rank == rank) == 126 * 1000
    assert len(folded.timeline.spans) < 4 * 126 / 2
    assert any(s.name.endswith("rounds: 3->4") for s in folded.timeline.spans)
    assert folded == replay_folded(rounds, 64, 64 * 1000, NodeTopology(4, A, B)), "the same result twice"


def test_what_cannot_be_folded() -> None:
    ring, exchange = symmetric_rounds("all_reduce", "ring", 12), symmetric_rounds("all_reduce", "halving", 16)
    assert ring is not None and exchange is not None
    assert not can_fold(ring, 12, 100, UniformTopology(A)), "chunks of different sizes"
    assert can_fold(ring, 12, 120, UniformTopology(A))
    assert not can_fold(ring, 12, 120, NodeTopology(8, A, B)), "the second node is not full"
    assert not can_fold(ring, 12, 120, TorusTopology((4, 4), 1, A, B)), "the torus is not full"
    assert not can_fold(exchange, 16, 160, TorusTopology((4, 4), 1, A, B)), "a torus cannot swap its nodes"
    assert not can_fold(ring, 12, 120, lambda a, b: A), "nobody knows what pairs have in common"


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "halving", "doubling"])
def test_the_work_does_not_grow_with_the_ranks(algorithm: str) -> None:
    """Messages that are replayed for 1,024 and for 16,384 ranks."""
    few, many = (
        len(replay_on_cluster("all_reduce", algorithm, p, 1 << 26, load("dgx-h100")).replay.timeline.spans)
        for p in (1024, 16384)
    )
    assert many <= few + 8 * 8, "log2(16) rounds more, and back, of 8 kinds of ranks"
