"""The alpha-beta model: time of a message, a round and a schedule, on one link or a topology of links.

A message of m bytes takes alpha + m beta. A rank sends one message and receives one message at a time, in parallel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..clusters import Cluster, Link
from ..core.errors import ClusterError
from ..schedules import Round, Schedule, messages

Port = tuple[str, int]
"""A resource that carries one message at a time, such as ("out", 3)."""


class Topology(ABC):
    """The link between two ranks, and the ports that they share with others."""

    @abstractmethod
    def link(self, src: int, dst: int) -> Link:
        """The link from `src` to `dst`."""

    def shared(self, src: int, dst: int) -> tuple[Port, ...]:
        """Ports that a message occupies during its transfer (not during its latency)."""
        return ()


@dataclass(frozen=True, slots=True)
class UniformTopology(Topology):
    """The same link between any two ranks."""

    single: Link

    def link(self, src: int, dst: int) -> Link:
        """The common link."""
        return self.single


@dataclass(frozen=True, slots=True)
class PairTopology(Topology):
    """A separate link for each pair of ranks."""

    between: Callable[[int, int], Link]

    def link(self, src: int, dst: int) -> Link:
        """The link of the pair."""
        return self.between(src, dst)


@dataclass(frozen=True, slots=True)
class NodeTopology(Topology):
    """Nodes of `devices` consecutive ranks; all messages that leave a node share one port."""

    devices: int
    inside: Link
    across: Link

    @classmethod
    def of(cls, cluster: Cluster) -> NodeTopology:
        """The two levels of a cluster."""
        if cluster.network is None:
            return cls(cluster.node.devices, cluster.node.link, cluster.node.link)
        return cls(cluster.node.devices, cluster.node.link, cluster.network.link)

    def link(self, src: int, dst: int) -> Link:
        """The link of the node, or of the network between nodes."""
        return self.inside if src // self.devices == dst // self.devices else self.across

    def shared(self, src: int, dst: int) -> tuple[Port, ...]:
        """The network ports of the two nodes; none inside a node."""
        a, b = src // self.devices, dst // self.devices
        return () if a == b else (("node out", a), ("node in", b))


Links = Link | Topology | Callable[[int, int], Link]
"""One link for all pairs, a topology, or a function from a pair of ranks to its link."""


def as_topology(links: Links) -> Topology:
    """The topology of any of the forms of `Links`."""
    if isinstance(links, Topology):
        return links
    return UniformTopology(links) if isinstance(links, Link) else PairTopology(links)


def message_seconds(m: float, link: Link) -> float:
    """alpha + m beta."""
    return link.alpha + m * link.beta


def round_seconds(sends: Round, sizes: Sequence[int], links: Links) -> float:
    """Time of the busiest port: the sum of its messages. `sizes` are the bytes of each chunk.

    Messages that share the port of a node transfer one after the other, but their latencies overlap.
    """
    topology = as_topology(links)
    ranks: defaultdict[Port, float] = defaultdict(float)
    transfers: defaultdict[Port, float] = defaultdict(float)
    latencies: defaultdict[Port, float] = defaultdict(float)
    for (src, dst), parts in messages(sends).items():
        link, m = topology.link(src, dst), sum(sizes[s.chunk] for s in parts)
        for port in (("out", src), ("in", dst)):
            ranks[port] += message_seconds(m, link)
        for port in topology.shared(src, dst):
            transfers[port] += m * link.beta
            latencies[port] = max(latencies[port], link.alpha)
    busiest = max(ranks.values(), default=0.0)
    return max(busiest, max((latencies[port] + transfers[port] for port in transfers), default=0.0))


def schedule_seconds(schedule: Schedule, sizes: Sequence[int], links: Links) -> float:
    """Sum of the rounds: each begins when all ranks have finished the previous one."""
    topology = as_topology(links)
    return sum(round_seconds(sends, sizes, topology) for sends in schedule.rounds)


def level(ranks: int, cluster: Cluster) -> Link | None:
    """The link between ranks of one node; None if they need several nodes. Refuses more ranks than devices."""
    if ranks <= cluster.node.devices:
        return cluster.node.link
    if cluster.network is None:
        raise ClusterError(
            f"{ranks} ranks on {cluster.name}, which is one node of {cluster.node.devices}",
            rule="more than one node needs a link between nodes",
            fix="add [network] with nodes and link.alpha, link.bandwidth to the cluster file",
        )
    if ranks > cluster.devices:
        nodes = -(-ranks // cluster.node.devices)
        raise ClusterError(
            f"{ranks} ranks on {cluster.name}", rule=f"it has {cluster.devices} devices", fix=f"network.nodes = {nodes}"
        )
    return None
