"""Time of a collective over devices in nodes, from the types of its links: alpha-beta with fitted constants.

Inside a node: a ring, or in-switch reduction. Between nodes: one ring through all devices, or a tree of nodes where
devices share ports or the switch reduces; the faster of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...clusters import Cluster
from ...clusters.link_types import LinkType, LinkTypes, link_types
from ...core.errors import InputError, nearest
from .ring_share import ring_share

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Devices in nodes, and the links that connect them, by data sheet."""

    devices_per_node: int
    node_bandwidth: float = 0.0
    """Bytes per second of one device to the others of its node, one direction."""
    node_link_type: str = ""
    in_switch_reduction: bool = False
    network_bandwidth: float = 0.0
    """Bytes per second of one node, one direction."""
    network_link_type: str = ""
    ports_per_node: int = 0
    """0 where unknown: then every device counts as having its own."""

    @property
    def has_tree(self) -> bool:
        """Whether collectives may use a tree of nodes: devices share ports, or the switch reduces."""
        return self.in_switch_reduction or 0 < self.ports_per_node < self.devices_per_node

    @classmethod
    def of(cls, cluster: Cluster) -> Interconnect:
        """Interconnect of a cluster whose file gives the types of its links."""
        link, network = cluster.node.link, cluster.network
        for key, one in (("node.link", link), ("network.link", network.link if network else None)):
            if one is not None and not one.type:
                raise InputError(
                    f"{cluster.name} does not give the type of its {key}",
                    where=f"{key}.type",
                    rule=f"one of {', '.join(link_types().link_type)}",
                )
        node = (cluster.node.devices, link.bandwidth, link.type, cluster.node.in_switch_reduction)
        return cls(*node, network.link.bandwidth, network.link.type, network.ports) if network else cls(*node)


def interconnect_seconds(
    collective: str, p: int, m: float, interconnect: Interconnect, types: LinkTypes | None = None
) -> float:
    """Seconds of a collective of m bytes (the whole buffer) over p devices that fill nodes in order."""
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
    types = types or link_types()
    if p <= interconnect.devices_per_node:
        return _inside_node(collective, p, m, interconnect, types.get(interconnect.node_link_type))
    return _between_nodes(collective, p, m, interconnect, types)


def ring_traffic(collective: str, p: int) -> float:
    """Bytes a ring sends on each link, in buffers: 2(p-1)/p for an all-reduce, half of that otherwise."""
    return (2 if collective == "all_reduce" else 1) * (p - 1) / p


def _inside_node(collective: str, p: int, m: float, interconnect: Interconnect, link: LinkType) -> float:
    hops, traffic = (2 if collective == "all_reduce" else 1) * (p - 1), ring_traffic(collective, p)
    if interconnect.in_switch_reduction and collective == "all_reduce" and (p + 1) / p < traffic:
        hops, traffic = 2, (p + 1) / p
    rate = link.efficiency * _ring_bandwidth(p, interconnect)
    return link.startup + link.hop * hops + m * (traffic / rate + link.local_seconds_per_byte)


def _ring_bandwidth(p: int, interconnect: Interconnect) -> float:
    direct = interconnect.node_link_type in ("nvlink", "xgmi")
    return interconnect.node_bandwidth * (ring_share(interconnect.devices_per_node, p) if direct else 1.0)


def _between_nodes(collective: str, p: int, m: float, interconnect: Interconnect, types: LinkTypes) -> float:
    link, d = types.get(interconnect.network_link_type), interconnect.devices_per_node
    nodes = math.ceil(p / d)
    slowest, local = interconnect.network_bandwidth * link.efficiency, link.local_seconds_per_byte
    if d > 1:
        inner = types.get(interconnect.node_link_type)
        slowest = min(slowest, inner.efficiency * _ring_bandwidth(d, interconnect))
        local = inner.local_seconds_per_byte
    hops = link.hop * math.log2(nodes)
    ring = link.startup + hops + m * (ring_traffic(collective, p) / slowest + local)
    if collective != "all_reduce" or not interconnect.has_tree or not link.tree_efficiency:
        return ring
    per_byte = ring_traffic(collective, nodes) / (interconnect.network_bandwidth * link.tree_efficiency)
    per_byte = max(per_byte, _tree_seconds_per_byte(interconnect, types))
    return min(ring, link.tree_startup + hops + m * (per_byte + local))


def _tree_seconds_per_byte(interconnect: Interconnect, types: LinkTypes) -> float:
    """Seconds per byte of the buffer that the links inside a node need under a tree of nodes."""
    d = interconnect.devices_per_node
    if d == 1:
        return 0.0
    traffic = (d + 1) / d if interconnect.in_switch_reduction else ring_traffic("all_reduce", d)
    return traffic / (types.get(interconnect.node_link_type).efficiency * _ring_bandwidth(d, interconnect))
