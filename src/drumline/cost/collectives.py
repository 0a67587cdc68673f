"""What collectives cost on a cluster: priced from any schedule, in closed form, or from a measured table."""

from __future__ import annotations

from ..cluster import Cluster, Link
from ..errors import InputError, nearest
from ..schedule import Schedule
from .forms import CLOSED_FORMS as CLOSED_FORMS
from .links import Links, level, schedule_seconds

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


def collective_seconds(collective: str, ranks: int, bytes: float, cluster: Cluster) -> float:
    """The time of a collective of `bytes` over neighbouring ranks of a cluster.

    If the cluster has a table measured with exactly these ranks, the table says it. Otherwise the closed form does, on
    the node's link when one node holds all ranks. Over n nodes of d devices the price has two levels (TWO_LEVELS):
    inside a node over d ranks on node.link, across over n nodes on network.link. All d devices of a node take part in
    the phase across, each with its share of m/d bytes, at the same time. The network's bandwidth is per node, so they
    share it: together a node sends as much as one rank with all m bytes would. An unfilled last node counts as full.
    """
    if collective not in DEFAULTS:
        raise InputError(
            f"unknown collective {collective!r}", rule=f"known: {', '.join(DEFAULTS)}",
            fix=nearest(collective, DEFAULTS),
        )  # fmt: skip
    if ranks < 1 or bytes < 0:
        raise InputError(f"{collective} of {bytes:g} bytes over {ranks} ranks", rule="ranks >= 1, bytes >= 0")
    if ranks == 1:
        return 0.0
    table = cluster.table(collective, ranks)
    if table is not None:
        return table.at(bytes)
    link = level(ranks, cluster)
    if link is not None:
        return _closed(collective, ranks, bytes, link)
    return two_level_seconds(collective, ranks, bytes, cluster)


def two_level_seconds(collective: str, ranks: int, bytes: float, cluster: Cluster) -> float:
    """The sum of the phases of TWO_LEVELS."""
    assert cluster.network is not None
    d = cluster.node.devices
    levels = {"inside": (d, cluster.node.link), "across": (-(-ranks // d), cluster.network.link)}
    return sum(_closed(phase, levels[where][0], bytes, levels[where][1]) for phase, where in TWO_LEVELS[collective])


def _closed(collective: str, p: int, m: float, link: Link) -> float:
    return CLOSED_FORMS[collective, DEFAULTS[collective]](p, m, link)
