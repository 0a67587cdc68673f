"""What collectives cost on a cluster: priced from any schedule, in closed form, or from a measured table."""

from __future__ import annotations

from ..clusters import Cluster, Link
from ..core.errors import InputError, nearest
from ..schedules import Schedule
from ..theory.alpha_beta import Links, level, schedule_seconds
from ..theory.collective_forms import CLOSED_FORMS as CLOSED_FORMS
from ..theory.collective_forms import switch_all_reduce_seconds

DEFAULTS = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "broadcast": "binomial"}
"""The algorithm that a collective is priced by when nothing was measured."""

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
    """The time of a collective of `bytes` over ranks of a cluster that stand `stride` apart: 1 means neighbours.

    If the cluster has a table measured with exactly these ranks, the table says it. Otherwise the closed form does, on
    the node's link when one node holds all ranks (of an all-reduce also that of its switch, where that adds up). Over n
    nodes the price has two levels (TWO_LEVELS), see `two_level_seconds`; where all ranks were measured, it is scaled to
    what they took. With a stride, as many groups as ranks in a stride do the same at the same time.
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
    if table is not None and link is not None:  # inside a node, ranks that stand apart are as near as neighbours
        return table.at(bytes)
    if link is not None:
        ring = _closed(collective, ranks, bytes, link)
        in_switch = cluster.node.in_switch_reduction and collective == "all_reduce"
        return min(ring, switch_all_reduce_seconds(ranks, bytes, link)) if in_switch else ring
    apart = two_level_seconds(collective, ranks, bytes, cluster, stride=stride)
    return apart * _as_measured(collective, bytes, cluster)


def _as_measured(collective: str, m: float, cluster: Cluster) -> float:
    """By what factor all ranks took longer for it than its price says, where that was measured over several nodes.

    Backends differ: gloo sends a reduce-scatter as an all-reduce. Other groups of ranks are taken to be like it.
    """
    table = cluster.table(collective, cluster.devices)
    return table.at(m) / two_level_seconds(collective, cluster.devices, m, cluster) if table and m else 1.0


def two_level_seconds(collective: str, ranks: int, bytes: float, cluster: Cluster, *, stride: int = 1) -> float:
    """The sum of the phases of TWO_LEVELS, over nodes of d devices each.

    A node holds d / stride ranks of a group, which meet on node.link; then the nodes meet on network.link. All ranks of
    a node take part in the phase across, each with its share of m, at the same time. The network's bandwidth is per
    node, so they share it: together the ranks of one group send as much as one rank with all m bytes would, and as
    many groups as stand on the node side by side divide the bandwidth. An unfilled last node counts as full.
    """
    assert cluster.network is not None
    d, wire = cluster.node.devices, cluster.network.link
    here, groups = max(1, d // stride), min(stride, d)
    shared = Link(wire.alpha, wire.bandwidth / groups) if groups > 1 else wire
    levels = {"inside": (here, cluster.node.link), "across": (-(-ranks // here), shared)}
    return sum(_closed(phase, levels[where][0], bytes, levels[where][1]) for phase, where in TWO_LEVELS[collective])


def _closed(collective: str, p: int, m: float, link: Link) -> float:
    return CLOSED_FORMS[collective, DEFAULTS[collective]](p, m, link)
