"""Seconds of the collectives that carry gradients, by the plan's `allreduce`: the algorithm that the engine runs.

The engine and this file follow the same rules (runtime/core/gradient_schedules.py): `auto` is the backend's own
collective, and `hierarchical` between CPU hosts that have equally many ranks. Over flat shards an algorithm is its two
halves (`SHARDED_HALVES`); one without halves all-reduces the whole bucket and gathers by a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import Cluster, Link
from ..plans import Plan
from ..plans.engine_constants import HOST_SEGMENT_BYTES, tree_segments
from ..schedules import NATIVE, SHARDED_HALVES
from ..theory.alpha_beta import level
from ..theory.collective_forms import CLOSED_FORMS
from .algorithm_choice import algorithm_seconds
from .collectives import collective_seconds, group_topology, node_levels


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks of a cluster, `stride` apart."""

    ranks: int
    stride: int

    def spans_hosts(self, cluster: Cluster) -> bool:
        """Whether they are on several nodes."""
        return self.ranks > 1 and level((self.ranks - 1) * self.stride + 1, cluster) is None

    def on_host(self, cluster: Cluster) -> int:
        """How many of them share a node."""
        return max(1, cluster.node.devices // self.stride)


def gradient_algorithm(plan: Plan, group: RankGroup, cluster: Cluster) -> str:
    """The algorithm that `allreduce` stands for among these ranks: a name, or `native`."""
    if plan.allreduce != "auto":
        return plan.allreduce
    sends_itself = plan.zero == 3 or plan.compress != "none" or plan.splits_model or plan.ep > 1
    if sends_itself or cluster.device.kind != "cpu" or plan.backend not in ("auto", "gloo"):
        return NATIVE
    here = group.on_host(cluster)
    equal = here > 1 and group.ranks % here == 0
    return "hierarchical" if group.spans_hosts(cluster) and equal else NATIVE


def gradient_seconds(collective: str, group: RankGroup, size: float, plan: Plan, cluster: Cluster) -> float:
    """The time of a collective of `size` bytes of gradients or updated parameters."""
    if group.ranks == 1 or not size:
        return 0.0
    algorithm = gradient_algorithm(plan, group, cluster)
    if algorithm == NATIVE:
        return collective_seconds(collective, group.ranks, size, cluster, stride=group.stride)
    if collective == "all_reduce":
        return named_seconds(collective, algorithm, group, size, cluster)
    halves = SHARDED_HALVES.get(algorithm)
    if halves:
        name = halves[0] if collective == "reduce_scatter" else halves[1]
        return named_seconds(collective, name, group, size, cluster)
    if collective == "reduce_scatter":
        return named_seconds("all_reduce", algorithm, group, size, cluster)
    return named_seconds(collective, "ring", group, size, cluster)


def named_seconds(collective: str, algorithm: str, group: RankGroup, size: float, cluster: Cluster) -> float:
    """The time of a collective by a named algorithm: measured with these ranks, or its schedule on the links."""
    segments = tree_segments(algorithm, int(size)) if collective == "all_reduce" else 1
    table = cluster.algorithm_table(collective, group.ranks, algorithm, segments)
    if table is not None and group.stride == 1:
        return table.at(size)
    if not group.spans_hosts(cluster):
        return algorithm_seconds(
            collective, algorithm, group.ranks, size, cluster.node.link, per_node=group.ranks, segments=segments
        )
    if (collective, algorithm) == ("all_reduce", "hierarchical"):
        return host_all_reduce_seconds(group, size, cluster)
    topology, per_node = group_topology(cluster, group.ranks, group.stride)
    return algorithm_seconds(collective, algorithm, group.ranks, size, topology, per_node=per_node, segments=segments)


def host_all_reduce_seconds(group: RankGroup, m: float, cluster: Cluster) -> float:
    """Of n segments: the first's reduce-scatter inside, n times the slower of network and memory, the last's gather.

    Inside a host each of d ranks sums its share of a segment; then d rings across h hosts share the network; then the
    shares are gathered. The network carries one segment while the hosts sum the next or gather the one before.
    """
    topology = node_levels(cluster, group.ranks, group.stride)
    d = topology.devices
    h = -(-group.ranks // d)
    n = max(1, -(-int(m) // HOST_SEGMENT_BYTES))
    segment = m / n
    scatter = CLOSED_FORMS["reduce_scatter", "ring"](d, segment, topology.inside)
    gather = CLOSED_FORMS["all_gather", "ring"](d, segment, topology.inside)
    rail = Link(topology.across.alpha, topology.across.bandwidth / d)
    across = CLOSED_FORMS["all_reduce", "ring"](h, segment / d, rail)
    return max(scatter + n * across + gather, n * (scatter + gather) + across)
