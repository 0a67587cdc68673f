"""Contention of groups of ranks that send at the same time, on a network with less than full bisection bandwidth.

Closed forms count the bytes that leave a node against the bandwidth of its ports together. Oversubscribed switches,
rails and the links of a torus may carry more than their share of these bytes. The busiest of them decides: every round
of a ring waits for it. Bytes are counted as flows: for each message of a round, the links on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from ..clusters import Cluster, Link
from ..theory.alpha_beta import NodeTopology, Port, Topology
from ..theory.topologies import TorusTopology, cluster_topology, topology_word
from .link_flows import group_flows, leaving, link_loads, most

ROUNDING = 1e-12
"""Relative difference of loads that are equal up to rounding."""


@dataclass(frozen=True, slots=True)
class Contention:
    """How messages between nodes suffer from the links of other nodes, or from single ports."""

    factor: float
    """Seconds on the busiest link over those on the ports of a node, all together: 1 at full bisection bandwidth."""
    level: str = ""
    """The level of the busiest link, such as `uplink`; empty if the factor is 1."""


NO_CONTENTION = Contention(1.0)

PATTERNS = ("next", "across", "all")
"""Messages of a round. `next`: each rank to the next of its group. `across`: to a rank of its group on the next node,
as in the phase between nodes of a hierarchical collective. `all`: to all others of its group."""


def cluster_contention(cluster: Cluster, ranks: int, stride: int, pattern: str) -> Contention:
    """The contention if all groups of `ranks`, `stride` apart, that the cluster has room for communicate at once."""
    if ranks < 2 or not limits_messages(cluster):
        return NO_CONTENTION
    block = ranks * stride
    world = max(1, cluster.devices // block) * block
    topology = cluster_topology(cluster, cluster.devices)
    if not isinstance(topology, NodeTopology | TorusTopology):
        return NO_CONTENTION  # one node, or links measured between all ranks
    return count_flows(topology, world, ranks, stride, pattern)


def limits_messages(cluster: Cluster) -> bool:
    """Whether anything but the ports of a node together can limit the messages between nodes."""
    network = cluster.network
    if network is None or network.nodes < 2:
        return False
    return network.oversubscription > 1 or topology_word(cluster) in ("rail", "torus")


@lru_cache(maxsize=4096)
def count_flows(
    topology: NodeTopology | TorusTopology, world: int, ranks: int, stride: int, pattern: str
) -> Contention:
    """The contention of a round of equal messages in all groups of a world of ranks."""
    block, nodes = ranks * stride, -(-world // topology.devices)
    assert pattern in PATTERNS and world % block == 0
    rounds = [group_flows(world, block, hop) for hop in _hops(ranks, stride, topology.devices, pattern)]
    left = most(leaving(nodes, topology.devices, *flows) for flows in rounds)
    if not left:
        return NO_CONTENTION
    levels = zip(*(link_loads(topology, nodes, *flows) for flows in rounds), strict=True)
    busiest = {same[0][0]: most(loads for _, loads in same) for same in levels}
    capacity = {level: topology.capacity((level, 0, 0)) for level in busiest}
    level = max(busiest, key=lambda level: busiest[level] / capacity[level])
    factor = busiest[level] * topology.across.bandwidth / (capacity[level] * left)
    return Contention(factor, level) if factor > 1 + ROUNDING else NO_CONTENTION


def _hops(ranks: int, stride: int, devices: int, pattern: str) -> Iterable[int]:
    """By how many ranks the receivers of a rank are further on, cyclically in its block of ranks."""
    if pattern == "all":
        return range(stride, ranks * stride, stride)
    return (stride if pattern == "next" else -(-devices // stride) * stride,)


@dataclass(frozen=True, slots=True)
class ConcurrentGroups(Topology):
    """A topology as one of several groups of ranks sees it, while all of them run the same schedule at the same time.

    The ports of a message are those of the messages that correspond to it in all groups, so the price of a round by
    `round_seconds` is that of all groups.
    """

    whole: NodeTopology | TorusTopology
    world: int
    ranks: int
    stride: int

    @classmethod
    def of(cls, cluster: Cluster, ranks: int, stride: int) -> ConcurrentGroups | None:
        """The groups of a cluster; None where nothing but the ports of nodes limits their messages."""
        topology = cluster_topology(cluster, cluster.devices) if limits_messages(cluster) else None
        block = ranks * stride
        if not isinstance(topology, NodeTopology | TorusTopology):
            return None
        return cls(topology, max(1, cluster.devices // block) * block, ranks, stride)

    def link(self, src: int, dst: int) -> Link:
        """The slowest link of this pair in any group."""
        links = [self.whole.link(a, b) for a, b in self._pairs(src, dst)]
        return Link(max(link.alpha for link in links), min(link.bandwidth for link in links))

    def capacity(self, port: Port) -> float:
        """That of the port."""
        return self.whole.capacity(port)

    def shared(self, src: int, dst: int) -> tuple[Port, ...]:
        """The ports between nodes of this pair in all groups; one that several pass is named as often."""
        return tuple(chain.from_iterable(self.whole.shared(a, b) for a, b in self._pairs(src, dst)))

    def _pairs(self, src: int, dst: int) -> Iterator[tuple[int, int]]:
        for start in range(0, self.world, self.ranks * self.stride):
            for offset in range(start, start + self.stride):
                yield offset + src * self.stride, offset + dst * self.stride
