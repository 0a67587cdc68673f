"""The time of a collective over devices in nodes, by what links are made of: alpha-beta with the constants of wires.

Inside a node a ring, or the switch where it adds up what passes. Between nodes one ring through all devices; where
devices share the node's ports, or the switch adds up, also a tree of nodes, whichever is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...clusters import Cluster
from ...clusters.link_types import LinkType, LinkTypes, link_types
from ...core.errors import InputError, nearest
from .mesh import ring_share

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Devices in nodes, and the links that join them, by the data sheet."""

    devices: int
    """Of a node."""
    inside: float = 0.0
    """Bytes per second of one device to the others of its node, one direction."""
    inside_wire: str = ""
    reduces: bool = False
    """Whether the switch adds up what passes."""
    across: float = 0.0
    """Bytes per second of one node, one direction."""
    across_wire: str = ""
    ports: int = 0
    """Of a node; 0 where that is not known, and then each device is taken to have its own."""

    @property
    def has_tree(self) -> bool:
        """Whether a node is the unit of a tree: its devices share ports, or its switch adds up what they have."""
        return self.reduces or 0 < self.ports < self.devices

    @classmethod
    def of(cls, cluster: Cluster) -> Fabric:
        """The links of a cluster whose file says what they are made of."""
        inside, network = cluster.node.link, cluster.network
        for key, link in (("node.link", inside), ("network.link", network.link if network else None)):
            if link is not None and not link.type:
                raise InputError(
                    f"{cluster.name} does not say what its {key} is made of",
                    where=f"{key}.wire",
                    rule=f"one of {', '.join(link_types().link_type)}",
                )
        made = cls(cluster.node.devices, inside.bandwidth, inside.type, cluster.node.in_switch_reduction)
        if network is None:
            return made
        return cls(
            made.devices,
            made.inside,
            made.inside_wire,
            made.reduces,
            network.link.bandwidth,
            network.link.type,
            network.ports,
        )


def fabric_seconds(collective: str, p: int, m: float, fabric: Fabric, known: LinkTypes | None = None) -> float:
    """The time of a collective of m bytes (of the whole buffer) over p devices that fill nodes in order."""
    if collective not in COLLECTIVES:
        raise InputError(
            f"unknown collective {collective!r}",
            rule=f"known: {', '.join(COLLECTIVES)}",
            fix=nearest(collective, COLLECTIVES),
        )
    if p < 1 or m < 0:
        raise InputError(f"{collective} of {m:g} bytes over {p} ranks", rule="ranks >= 1, bytes >= 0")
    if p == 1:
        return 0.0
    known = known or link_types()
    if p <= fabric.devices:
        return _inside(collective, p, m, fabric, known.get(fabric.inside_wire))
    return _across(collective, p, m, fabric, known)


def wire_share(collective: str, p: int) -> float:
    """What a ring sends of the buffer on each link: 2(p-1)/p for an all-reduce, half of that for its two halves."""
    return (2 if collective == "all_reduce" else 1) * (p - 1) / p


def _inside(collective: str, p: int, m: float, fabric: Fabric, wire: LinkType) -> float:
    hops, share = (2 if collective == "all_reduce" else 1) * (p - 1), wire_share(collective, p)
    if fabric.reduces and collective == "all_reduce" and (p + 1) / p < share:
        hops, share = 2, (p + 1) / p
    rate = wire.efficiency * _ring_rate(p, fabric)
    return wire.startup + wire.hop * hops + m * (share / rate + wire.local_seconds_per_byte)


def _ring_rate(p: int, fabric: Fabric) -> float:
    direct = fabric.inside_wire in ("nvlink", "xgmi")
    return fabric.inside * (ring_share(fabric.devices, p) if direct else 1.0)


def _across(collective: str, p: int, m: float, fabric: Fabric, known: LinkTypes) -> float:
    wire, nodes = known.get(fabric.across_wire), math.ceil(p / fabric.devices)
    slowest, touch = fabric.across * wire.efficiency, wire.local_seconds_per_byte
    if fabric.devices > 1:
        inner = known.get(fabric.inside_wire)
        slowest, touch = (
            min(slowest, inner.efficiency * _ring_rate(fabric.devices, fabric)),
            inner.local_seconds_per_byte,
        )
    hops = wire.hop * math.log2(nodes)
    ring = wire.startup + hops + m * (wire_share(collective, p) / slowest + touch)
    if collective != "all_reduce" or not fabric.has_tree or not wire.tree_efficiency:
        return ring
    rate = wire_share(collective, nodes) / (fabric.across * wire.tree_efficiency)
    return min(ring, wire.tree_startup + hops + m * (max(rate, _node_rate(fabric, known)) + touch))


def _node_rate(fabric: Fabric, known: LinkTypes) -> float:
    """Seconds per byte of the buffer that a node's own link needs under a tree of nodes."""
    d = fabric.devices
    if d == 1:
        return 0.0
    share = (d + 1) / d if fabric.reduces else wire_share("all_reduce", d)
    return share / (known.get(fabric.inside_wire).efficiency * _ring_rate(d, fabric))
