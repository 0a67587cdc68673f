"""The topology of a cluster: from its file, or from the links that `measure` found between its ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ..clusters import Cluster, Link
from ..clusters.checks import refuse_wrong_topology
from .alpha_beta import NodeTopology, PairTopology, Port, Topology, UniformTopology, level


@dataclass(frozen=True, slots=True)
class TorusTopology(Topology):
    """Nodes in a ring of each direction; a message goes along the last direction first, each the shorter way round."""

    shape: tuple[int, ...]
    """Nodes in each direction; neighbours in the last one have consecutive numbers."""
    devices: int
    inside: Link
    across: Link
    """Of one node, all ports together: two for each direction."""

    def link(self, src: int, dst: int) -> Link:
        """The link of the node, or that of a port; its start-up counts once, however many nodes are on the way."""
        if src // self.devices == dst // self.devices:
            return self.inside
        return Link(self.across.alpha, self._port_bandwidth)

    def path(self, src: int, dst: int) -> tuple[Port, ...]:
        """The ports of the two devices inside a node, else one port for each node that is passed."""
        return self.shared(src, dst) or (("device out", src, 0), ("device in", dst, 0))

    def shared(self, src: int, dst: int) -> tuple[Port, ...]:
        """The ports between nodes."""
        at, to = self._place(src // self.devices), self._place(dst // self.devices)
        ports: list[Port] = []
        for axis in reversed(range(len(self.shape))):
            n = self.shape[axis]
            forward = (to[axis] - at[axis]) % n
            sign, hops = ("+", forward) if 2 * forward <= n else ("-", n - forward)
            for _ in range(hops):
                ports.append((f"torus {'xyz'[axis]}{sign}", self._number(at) * self.devices, 0))
                at[axis] = (at[axis] + (1 if sign == "+" else -1)) % n
        return tuple(ports)

    def capacity(self, port: Port) -> float:
        """Of a device, or of one port of a node."""
        return self.inside.bandwidth if port[0].startswith("device") else self._port_bandwidth

    def period(self, p: int) -> int | None:
        """The ranks of one place in the first direction, if the ranks fill the torus."""
        return p // self.shape[0] if p == self.devices * math.prod(self.shape) else None

    @property
    def _port_bandwidth(self) -> float:
        return self.across.bandwidth / (2 * len(self.shape))

    def _place(self, node: int) -> list[int]:
        place = []
        for n in reversed(self.shape):
            node, i = divmod(node, n)
            place.append(i)
        return place[::-1]

    def _number(self, place: list[int]) -> int:
        number = 0
        for i, n in zip(place, self.shape, strict=True):
            number = number * n + i
        return number


def cluster_topology(cluster: Cluster, ranks: int) -> Topology:
    """The topology of the first ranks of a cluster, which must have at least as many devices.

    Measured links between all of these ranks come first. One node is one link; for several, `network.topology` counts.
    """
    between = {(pair.src, pair.dst): pair.link for pair in cluster.rank_link}
    if ranks > 1 and between and all(pair in between for pair in itertools.permutations(range(ranks), 2)):
        return PairTopology(lambda src, dst: between[src, dst])
    link = level(ranks, cluster)
    if link is not None:
        return UniformTopology(link)
    assert cluster.network is not None
    refuse_wrong_topology(cluster, cluster.name)
    network, inside, devices = cluster.network, cluster.node.link, cluster.node.devices
    if topology_word(cluster) == "torus":
        return TorusTopology(network.shape, devices, inside, network.link)
    rails = max(1, network.ports) if topology_word(cluster) == "rail" else 1
    return NodeTopology(
        devices, inside, network.link, min(rails, devices), network.nodes_per_switch, network.oversubscription
    )


def topology_word(cluster: Cluster) -> str:
    """The topology between the nodes of a cluster: what its file says, or what its ports suggest; empty for one node.

    Nodes with several ports count as a fat tree in which every message uses all ports of its node, as NCCL's channels
    do: the price of `plan` is the same. A node with one port, or an unknown number, is on plain Ethernet.
    """
    if cluster.network is None:
        return ""
    return cluster.network.topology or ("fat-tree" if cluster.network.ports > 1 else "ethernet")
