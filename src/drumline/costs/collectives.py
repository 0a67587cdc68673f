"""Seconds of collectives and messages on a cluster, from a schedule, in closed form or from a measured table.

The mesh is pp x replica x shard x rows x columns x cp x tp, outermost first: the stride of an axis is the number of
ranks of the axes inside it. Groups of one axis that share a node share its network port.
"""

from __future__ import annotations

from ..clusters import Cluster, Link
from ..core.errors import InputError, nearest
from ..plans import Plan
from ..schedules import Schedule
from ..theory.alpha_beta import Links, NodeTopology, Topology, level, message_seconds, schedule_seconds
from ..theory.collective_forms import CLOSED_FORMS as CLOSED_FORMS
from ..theory.collective_forms import switch_all_reduce_seconds
from ..theory.roofline import compute_type
from .algorithm_choice import algorithm_seconds
from .contention import ConcurrentGroups, cluster_contention
from .tuning import LONG_MESSAGE

DEFAULTS = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "broadcast": "binomial"}
"""The algorithm that a collective is priced by when nothing was measured."""

GLOO_ALGORITHMS = {**DEFAULTS, "reduce_scatter": "direct"}
"""The algorithms between CPUs: gloo's own, and the engine's reduce-scatter over it."""

MOST_PRICED_RANKS = 256
"""Ranks up to which a schedule between CPU nodes is priced round by round; beyond, all links count as the slowest."""

TWO_LEVELS: dict[str, tuple[tuple[str, str], ...]] = {
    "all_reduce": (("reduce_scatter", "inside"), ("all_reduce", "across"), ("all_gather", "inside")),
    "all_gather": (("all_gather", "across"), ("all_gather", "inside")),
    "reduce_scatter": (("reduce_scatter", "inside"), ("reduce_scatter", "across")),
    "broadcast": (("broadcast", "across"), ("broadcast", "inside")),
}
"""The phases of a collective over several nodes, each with the level of links that it runs on."""


def price(schedule: Schedule, message_bytes: int, links: Links, *, itemsize: int = 1) -> float:
    """The time of any schedule for a buffer of that many bytes, whose elements of `itemsize` bytes stay whole."""
    return schedule_seconds(schedule, schedule.sizes(message_bytes, itemsize=itemsize), links)


def collective_seconds(collective: str, ranks: int, bytes: float, cluster: Cluster, *, stride: int = 1) -> float:
    """The time of a collective of `bytes` over ranks of a cluster that are `stride` apart; 1 means neighbours.

    A table measured with exactly these ranks is used if the cluster has one. Otherwise it is the closed form on the
    node's link if one node has all ranks (for an all-reduce also that of its switch, if that reduces). Over several GPU
    nodes the price has two levels (TWO_LEVELS), see `two_level_seconds`; over CPU nodes it is that of the schedule that
    gloo runs. Both are scaled to a measurement of all ranks if there is one. With a stride, `stride` groups do the same
    at the same time.
    """
    if collective not in DEFAULTS:
        raise InputError(
            f"unknown collective {collective!r}",
            rule=f"known: {', '.join(DEFAULTS)}",
            fix=nearest(collective, DEFAULTS),
        )
    if ranks < 1 or bytes < 0 or stride < 1:
        raise InputError(
            f"{collective} of {bytes:g} bytes over {ranks} ranks, {stride} apart",
            rule="ranks >= 1, bytes >= 0, stride >= 1",
        )
    if ranks == 1:
        return 0.0
    table = cluster.table(collective, ranks)
    if table is not None and stride == 1:
        return table.at(bytes)
    link = level((ranks - 1) * stride + 1, cluster)
    if table is not None and link is not None:  # inside a node, a stride makes no difference
        return table.at(bytes)
    if link is not None:
        ring = _closed(collective, ranks, bytes, link)
        in_switch = cluster.node.in_switch_reduction and collective == "all_reduce"
        return min(ring, switch_all_reduce_seconds(ranks, bytes, link)) if in_switch else ring
    predicted = _across_nodes(collective, ranks, bytes, cluster, stride)
    return predicted * _measured_factor(collective, bytes, cluster)


def _measured_factor(collective: str, m: float, cluster: Cluster) -> float:
    """Measured over predicted time of all ranks, if that was measured over several nodes.

    Backends differ: gloo sends a reduce-scatter as an all-reduce. Other groups of ranks are assumed to be alike.
    """
    table = cluster.table(collective, cluster.devices)
    return table.at(m) / _across_nodes(collective, cluster.devices, m, cluster, 1) if table and m else 1.0


def _across_nodes(collective: str, ranks: int, m: float, cluster: Cluster, stride: int) -> float:
    """By the backend's own algorithm: NCCL has two levels; gloo, between CPUs, does not know of nodes."""
    if cluster.device.kind != "cpu":
        return two_level_seconds(collective, ranks, m, cluster, stride=stride)
    if ranks > MOST_PRICED_RANKS:
        return _closed(collective, ranks, m, slowest_hop(ranks, stride, cluster))
    topology, per_node = group_topology(cluster, ranks, stride)
    return algorithm_seconds(collective, GLOO_ALGORITHMS[collective], ranks, m, topology, per_node=per_node)


def node_levels(cluster: Cluster, ranks: int, stride: int) -> NodeTopology:
    """The links between ranks `stride` apart: those that share a node, and their part of the network between nodes.

    That is their part of the node's ports together, or less where other links are busier (`costs.contention`).
    """
    assert cluster.network is not None
    d, wire = cluster.node.devices, cluster.network.link
    together = min(stride, d) * cluster_contention(cluster, ranks, stride, "across").factor
    shared = Link(wire.alpha, wire.bandwidth / together) if together > 1 else wire
    return NodeTopology(max(1, d // stride), cluster.node.link, shared)


def group_topology(cluster: Cluster, ranks: int, stride: int) -> tuple[Topology, int]:
    """(the links on which any schedule of such ranks is priced, how many of them share a node)."""
    levels = node_levels(cluster, ranks, stride)
    return ConcurrentGroups.of(cluster, ranks, stride) or levels, levels.devices


def two_level_seconds(collective: str, ranks: int, bytes: float, cluster: Cluster, *, stride: int = 1) -> float:
    """The sum of the phases of TWO_LEVELS, over nodes of d devices each.

    A node has d / stride ranks of a group, which communicate on node.link; then the nodes do on network.link. All ranks
    of a node take part in the phase across, each with its share of m, at the same time. The network's bandwidth is per
    node, so they share it: together the ranks of one group send as much as one rank with all m bytes would, and the
    groups on a node divide the bandwidth. An unfilled last node counts as full. Where switches, rails or a torus limit
    the messages of all groups together, the phase across waits for their busiest link.
    """
    topology = node_levels(cluster, ranks, stride)
    here = topology.devices
    levels = {"inside": (here, topology.inside), "across": (-(-ranks // here), topology.across)}
    return sum(_closed(phase, levels[where][0], bytes, levels[where][1]) for phase, where in TWO_LEVELS[collective])


def _closed(collective: str, p: int, m: float, link: Link) -> float:
    return CLOSED_FORMS[collective, DEFAULTS[collective]](p, m, link)


def copies(plan: Plan) -> int:
    """Ranks that have parts of the same samples and the same parameters."""
    return plan.tile[0] * plan.tile[1] * plan.cp


def inner(plan: Plan) -> int:
    """Ranks of one stage that work on the same samples: the stride of the data-parallel axes."""
    return copies(plan) * plan.tp


def replicas(plan: Plan) -> tuple[int, int]:
    """(ranks that sum each shard of the gradients, their stride)."""
    count = plan.dp // plan.shards
    if copies(plan) == 1:
        return count, plan.shards * plan.tp
    # other tiles and tokens are within a replica: the group begins at the nearest of them
    return count * copies(plan), plan.tp


def holders(plan: Plan) -> tuple[int, int]:
    """The same for parameters that all tensor-parallel ranks have: those are the nearest of the group."""
    count, stride = replicas(plan)
    return count * plan.tp, stride if plan.tp == 1 else 1


def axis_group(name: str, plan: Plan) -> tuple[int, int]:
    """(ranks, stride) of an axis of one layer's messages."""
    rows, columns = plan.tile
    return {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, plan.cp * plan.tp),
        "columns": (columns, plan.cp * plan.tp),
        "rows": (rows, columns * plan.cp * plan.tp),
    }[name]


def axis_seconds(name: str, collective: str, size: float, plan: Plan, cluster: Cluster) -> float:
    """Seconds of a message along an axis in the middle of a step; `send` and `ring` are to a neighbour."""
    ranks, stride = axis_group(name, plan)
    if ranks == 1:
        return 0.0
    if collective == "all_to_all":
        return max(cluster.mid_step_message_s, exchange_seconds(ranks, size, cluster, stride=stride))
    if collective in ("send", "ring"):
        return max(cluster.mid_step_message_s, send_seconds(size, ranks, stride, cluster))
    return max(cluster.mid_step_message_s, collective_seconds(collective, ranks, size, cluster, stride=stride))


def exchange_seconds(ranks: int, bytes: float, cluster: Cluster, *, stride: int = 1) -> float:
    """An all-to-all in which every rank sends `bytes` in all, in equal parts to every rank, itself included.

    Links inside a node and the ports of nodes work at once. All devices of a node send, whatever their group.
    """
    d = cluster.node.devices
    near = min(ranks, max(1, d // stride))
    inside = (near - 1) * cluster.node.link.alpha + bytes * (near - 1) / ranks * cluster.node.link.beta
    if near == ranks or cluster.network is None:
        return inside
    wire, nodes = cluster.network.link, -(-ranks // near)
    sent = bytes * (ranks - near) / ranks * min(d, ranks * stride)
    sent *= cluster_contention(cluster, ranks, stride, "all").factor
    return max(inside, (nodes - 1) * wire.alpha + sent * wire.beta)


def send_seconds(size: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """A message to the next rank along an axis, while all ranks send one; the slowest of them."""
    return message_seconds(size, slowest_hop(ranks, stride, cluster))


def slowest_hop(ranks: int, stride: int, cluster: Cluster) -> Link:
    """The slowest link between neighbours along an axis; those that send at once share the links between nodes."""
    inside = level((ranks - 1) * stride + 1, cluster)
    if inside is not None:
        return inside
    assert cluster.network is not None
    wire, together = cluster.network.link, min(stride, cluster.node.devices)
    return Link(wire.alpha, wire.bandwidth / together / cluster_contention(cluster, ranks, stride, "next").factor)


def between_stages(size: float, plan: Plan, cluster: Cluster) -> float:
    """Seconds of `size` bytes from one pipeline stage to the next."""
    return send_seconds(size, plan.pp, plan.ranks // plan.pp, cluster)


def flops_per_byte(plan: Plan, cluster: Cluster) -> float:
    """The cost of a byte between two stages, in floating-point operations of a device, in a long message."""
    rate = cluster.device.peak.get(compute_type(plan.precision)) or max(cluster.device.peak.values())
    return rate * between_stages(LONG_MESSAGE, plan, cluster) / LONG_MESSAGE
