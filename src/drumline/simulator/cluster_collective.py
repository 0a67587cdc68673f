"""One collective on the links of a cluster that it would run on: replayed, and next to it the price by formula."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction

from ..clusters import Cluster
from ..core.timeline import Span, Timeline
from ..schedules import Schedule, collective_schedule
from ..schedules.symmetric import SymmetricRounds, symmetric_rounds
from ..theory.alpha_beta import Topology, UniformTopology, schedule_seconds
from ..theory.collective_forms import CLOSED_FORMS
from ..theory.topologies import cluster_topology
from .collective_replay import MOST_MESSAGES, CollectiveCall, NetworkReplay, replay_together, too_many_messages
from .folded_replay import can_fold, price_rounds, replay_folded
from .network import ReplayTooLarge

DRAWN_MESSAGES = 20_000
"""Messages up to which every rank is replayed and drawn, even if ranks are alike."""
MOST_SENDS = 4_000_000
"""Ranks times chunks of a schedule that is written out."""


@dataclass(frozen=True, slots=True)
class ClusterCollective:
    """A collective on a cluster."""

    schedule: Schedule
    cluster: Cluster
    """With as many nodes as the ranks take."""
    bytes: int
    replay: NetworkReplay
    formula_seconds: float
    """The closed form on one link, or the sum of the rounds on several."""
    formula: str
    """Which of the two: `closed form` or `round by round`."""
    symmetric: tuple[SymmetricRounds, ...] | None
    """The rounds in short, if all ranks are alike."""
    topology: Topology

    @property
    def nodes(self) -> int:
        """Nodes that have a rank."""
        return -(-self.schedule.p // self.cluster.node.devices)

    @property
    def where(self) -> str:
        """Ranks and nodes, such as `16 ranks on 2 nodes of dgx-a100`."""
        place = f"{self.nodes} nodes of {self.cluster.name}" if self.nodes > 1 else f"one node of {self.cluster.name}"
        return f"{self.schedule.p} rank{'s' * (self.schedule.p != 1)} on {place}"

    def counts(self) -> str:
        """Rounds, messages and bytes of a rank, as text."""
        if self.replay.priced_as_one:
            return f"{self.schedule.name} p={self.schedule.p}: too many messages to replay; no link is shared"
        if self.replay.kinds is None:
            return str(self.schedule)
        assert self.symmetric is not None
        rounds = sum(one.times for one in self.symmetric)
        share = sum((one.times * one.share for one in self.symmetric), Fraction())
        return f"{self.schedule.name} p={self.schedule.p}: {rounds} rounds; a rank sends {float(share):.4g} m bytes"


def replay_on_cluster(collective: str, algorithm: str, ranks: int, m: int, cluster: Cluster) -> ClusterCollective:
    """Replay m bytes over the first ranks of a cluster, node by node.

    A network has as many nodes as the ranks take (a torus has those of its shape). A cluster of one node counts as
    having all ranks on the node's link.
    """
    cluster = _with_ranks(cluster, ranks)
    topology = cluster_topology(cluster, ranks)
    schedule = collective_schedule(collective, algorithm, ranks, per_node=cluster.node.devices)
    rounds = symmetric_rounds(collective, algorithm, ranks, cluster.node.devices)
    one_link = isinstance(topology, UniformTopology)
    closed = CLOSED_FORMS[collective, algorithm](ranks, m, cluster.node.link) if one_link else 0.0
    messages = ranks * sum(one.times for one in rounds or ())
    if rounds is not None and messages > DRAWN_MESSAGES and can_fold(rounds, ranks, m, topology):
        replay = replay_folded(rounds, ranks, m, topology)
        priced = closed if one_link else price_rounds(rounds, ranks, m, topology)
    else:
        try:
            if ranks > MOST_MESSAGES or ranks * schedule.chunks > MOST_SENDS:
                raise too_many_messages(schedule.name, ranks)
            replay = replay_together([CollectiveCall(schedule, m)], topology)
        except ReplayTooLarge:
            if not one_link:
                raise too_many_messages(schedule.name, ranks, _way_out(rounds, ranks, m, topology)) from None
            replay = _priced_as_one(schedule, closed)
        priced = closed if one_link else schedule_seconds(schedule, schedule.sizes(m), topology)
    formula = "closed form" if one_link else "round by round"
    return ClusterCollective(schedule, cluster, m, replay, priced, formula, rounds, topology)


def _with_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with enough nodes; or, without a network, with enough devices in its node."""
    if ranks <= cluster.devices:
        return cluster
    if cluster.network is None:
        return dataclasses.replace(cluster, node=dataclasses.replace(cluster.node, devices=ranks))
    if cluster.network.topology == "torus":
        return cluster  # which refuses more ranks than its shape has
    nodes = -(-ranks // cluster.node.devices)
    return dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, nodes=nodes))


def _priced_as_one(schedule: Schedule, seconds: float) -> NetworkReplay:
    """A collective that shares no link, as one span."""
    span = Span(0, "link", f"{schedule.name} over {schedule.p} ranks", 0.0, seconds)
    timeline = Timeline("predicted", (span,), ("priced as one",))
    return NetworkReplay(timeline, seconds, (seconds,), (), priced_as_one=True)


def _way_out(rounds: tuple[SymmetricRounds, ...] | None, p: int, m: int, topology: Topology) -> str:
    """The change after which the ranks are alike."""
    if rounds is None:
        return "fewer ranks, or an algorithm in which all ranks do the same: ring, hierarchical, halving, pairwise"
    even = -(-m // p) * p
    if can_fold(rounds, p, even, topology):
        return f"--bytes {even}, which {p} ranks divide evenly"
    return "fewer ranks, or as many as fill all nodes"
