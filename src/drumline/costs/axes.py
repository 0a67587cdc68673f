"""Where the axes of a plan lie on a cluster, and what a message along one of them costs.

The mesh is pp x replica x shard x rows x columns x cp x tp, outermost first: the ranks of an axis stand as far apart as
the axes inside it have ranks, and the groups of an axis that share a node share its way out.
"""

from __future__ import annotations

from ..clusters import Cluster, Link
from ..plans import Plan
from ..theory.alpha_beta import level, message_seconds
from .collectives import collective_seconds

LONG = 2.0**24
"""Bytes of a message that costs its bytes, and little else."""


def copies(plan: Plan) -> int:
    """Ranks that have parts of the same samples and the same parameters."""
    return plan.tile[0] * plan.tile[1] * plan.cp


def inner(plan: Plan) -> int:
    """Ranks that work on the same samples, of one stage: neighbours along the data-parallel axes stand so far apart."""
    return copies(plan) * plan.tp


def replicas(plan: Plan) -> tuple[int, int]:
    """(how many ranks sum each share of the gradients, how far apart they stand)."""
    count = plan.dp // plan.shards
    if copies(plan) == 1:
        return count, plan.shards * plan.tp
    # other tiles and tokens stand within a replica: their span begins at the nearest of them
    return count * copies(plan), plan.tp


def holders(plan: Plan) -> tuple[int, int]:
    """The same for what all tensor-parallel ranks have: they are the nearest of those that sum it."""
    count, stride = replicas(plan)
    return count * plan.tp, stride if plan.tp == 1 else 1


def axis_of(name: str, plan: Plan) -> tuple[int, int]:
    """(ranks, stride) of an axis of one layer's messages."""
    rows, columns = plan.tile
    return {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "columns": (columns, plan.cp * plan.tp),
        "rows": (rows, columns * plan.cp * plan.tp),
    }[name]


def along(name: str, collective: str, size: float, plan: Plan, cluster: Cluster) -> float:
    """Seconds of a message along an axis, amid a step; `send` and `ring` are to a neighbour."""
    ranks, stride = axis_of(name, plan)
    if ranks == 1:
        return 0.0
    if collective in ("send", "ring"):
        return max(cluster.mid_step_message_s, send_seconds(size, ranks, stride, cluster))
    return max(cluster.mid_step_message_s, collective_seconds(collective, ranks, size, cluster, stride=stride))


def send_seconds(size: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """A message to the next rank along an axis, while all ranks send one; the slowest of them."""
    return message_seconds(size, hop(ranks, stride, cluster))


def hop(ranks: int, stride: int, cluster: Cluster) -> Link:
    """The slowest link between neighbours along an axis; those that leave a node at once share its port."""
    inside = level((ranks - 1) * stride + 1, cluster)
    if inside is not None:
        return inside
    assert cluster.network is not None
    wire, together = cluster.network.link, min(stride, cluster.node.devices)
    return Link(wire.alpha, wire.bandwidth / together)


def between_stages(size: float, plan: Plan, cluster: Cluster) -> float:
    """What a stage hands to the next one."""
    return send_seconds(size, plan.pp, plan.ranks // plan.pp, cluster)


def flops_per_byte(plan: Plan, cluster: Cluster) -> float:
    """What a byte between two stages costs, in operations of a device, in a long message."""
    rate = cluster.device.peak.get(plan.precision) or max(cluster.device.peak.values())
    return rate * between_stages(LONG, plan, cluster) / LONG
