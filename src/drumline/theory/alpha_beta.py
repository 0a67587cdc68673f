"""Alpha-beta: the time of a message, of a round and of a schedule, on one link or on a topology of links.

A message of m bytes takes alpha + m beta. A rank sends one message at a time and receives one at a time, both at once.
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
"""Something that carries one message at a time, such as ("out", 3)."""


class Topology(ABC):
    """Which link joins two ranks, and what they share with others on the way."""

    @abstractmethod
    def link(self, src: int, dst: int) -> Link:
        """The link that a message from `src` to `dst` takes."""

    def shared(self, src: int, dst: int) -> tuple[Port, ...]:
        """The ports that it holds while its bytes are on the wire (not while it starts up)."""
        return ()


@dataclass(frozen=True, slots=True)
class Flat(Topology):
    """The same link between any two ranks."""

    wire: Link

    def link(self, src: int, dst: int) -> Link:
        """The one link."""
        return self.wire


@dataclass(frozen=True, slots=True)
class Pairs(Topology):
    """A link of its own for each pair of ranks."""

    between: Callable[[int, int], Link]

    def link(self, src: int, dst: int) -> Link:
        """The pair's link."""
        return self.between(src, dst)


@dataclass(frozen=True, slots=True)
class Nodes(Topology):
    """Nodes of `devices` ranks each, in the order of ranks: all messages that leave a node share its one port."""

    devices: int
    inside: Link
    across: Link

    @classmethod
    def of(cls, cluster: Cluster) -> Nodes:
        """The two levels of a cluster."""
        if cluster.network is None:
            return cls(cluster.node.devices, cluster.node.link, cluster.node.link)
        return cls(cluster.node.devices, cluster.node.link, cluster.network.link)

    def link(self, src: int, dst: int) -> Link:
        """The node's link, or the network's between nodes."""
        return self.inside if src // self.devices == dst // self.devices else self.across

    def shared(self, src: int, dst: int) -> tuple[Port, ...]:
        """The network port of each of the two nodes; none inside a node."""
        a, b = src // self.devices, dst // self.devices
        return () if a == b else (("node out", a), ("node in", b))


Links = Link | Topology | Callable[[int, int], Link]
"""One link for all pairs, a topology, or a function from a pair of ranks to its link."""


def as_topology(links: Links) -> Topology:
    """The topology that the shorter forms stand for."""
    if isinstance(links, Topology):
        return links
    return Flat(links) if isinstance(links, Link) else Pairs(links)


def message_seconds(m: float, link: Link) -> float:
    """alpha + m beta."""
    return link.alpha + m * link.beta


def round_seconds(sends: Round, sizes: Sequence[int], links: Links) -> float:
    """The time of the busiest port: the sum of its messages. `sizes` are the bytes of each chunk.

    Of messages that share a node's port the bytes follow each other, while their start-ups pass at the same time.
    """
    topology = as_topology(links)
    ranks: defaultdict[Port, float] = defaultdict(float)
    wires: defaultdict[Port, float] = defaultdict(float)
    starts: defaultdict[Port, float] = defaultdict(float)
    for (src, dst), parts in messages(sends).items():
        link, m = topology.link(src, dst), sum(sizes[s.chunk] for s in parts)
        for port in (("out", src), ("in", dst)):
            ranks[port] += message_seconds(m, link)
        for port in topology.shared(src, dst):
            wires[port] += m * link.beta
            starts[port] = max(starts[port], link.alpha)
    busiest = max(ranks.values(), default=0.0)
    return max(busiest, max((starts[port] + wires[port] for port in wires), default=0.0))


def schedule_seconds(schedule: Schedule, sizes: Sequence[int], links: Links) -> float:
    """The sum of its rounds: each begins when all ranks have ended the one before."""
    topology = as_topology(links)
    return sum(round_seconds(sends, sizes, topology) for sends in schedule.rounds)


def level(ranks: int, cluster: Cluster) -> Link | None:
    """The one link between ranks of one node; None when they need more than one node. Refuses more than there are."""
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
