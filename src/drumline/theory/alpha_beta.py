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

Port = tuple[str, int, int]
"""A link in one direction: its level, the lowest rank behind it, and its number if that has several, else 0."""


class Topology(ABC):
    """The link between two ranks, and the ports that their messages pass."""

    @abstractmethod
    def link(self, src: int, dst: int) -> Link:
        """The link from `src` to `dst`, as one message sees it that is alone."""

    def path(self, src: int, dst: int) -> tuple[Port, ...]:
        """Ports that a message passes during its transfer (not during its latency), in order."""
        return (("device out", src, 0), ("device in", dst, 0))

    @abstractmethod
    def capacity(self, port: Port) -> float:
        """Bytes per second of a port: messages that pass it at the same time share them."""

    def shared(self, src: int, dst: int) -> tuple[Port, ...]:
        """The ports of the path that messages between other ranks may also pass."""
        return ()

    def period(self, p: int) -> int | None:
        """The fewest ranks by which all p can be shifted, cyclically, without a change of any link; None if unknown."""
        return None


@dataclass(frozen=True, slots=True)
class UniformTopology(Topology):
    """The same link between any two ranks."""

    single: Link

    def link(self, src: int, dst: int) -> Link:
        """The common link."""
        return self.single

    def capacity(self, port: Port) -> float:
        """That of the common link, for each rank and direction."""
        return self.single.bandwidth

    def period(self, p: int) -> int | None:
        """All ranks are alike."""
        return 1


@dataclass(frozen=True, slots=True)
class PairTopology(Topology):
    """A separate link for each pair of ranks."""

    between: Callable[[int, int], Link]

    def link(self, src: int, dst: int) -> Link:
        """The link of the pair."""
        return self.between(src, dst)

    def path(self, src: int, dst: int) -> tuple[Port, ...]:
        """The link of the pair."""
        return (("rank link", src, dst),)

    def capacity(self, port: Port) -> float:
        """That of the pair."""
        _, src, dst = port
        return self.between(src, dst).bandwidth


@dataclass(frozen=True, slots=True)
class NodeTopology(Topology):
    """Nodes of `devices` consecutive ranks, each with ports to one network of switches.

    Without rails, a message between nodes uses all ports of a node together, as NCCL's channels do, and shares them
    with all others that leave the node. With rails, device i sends and receives through port i alone. Switches without
    oversubscription carry everything that the ports send.
    """

    devices: int
    inside: Link
    """Of one device to the others of its node."""
    across: Link
    """Of one node to the others, all ports together."""
    rails: int = 1
    """Ports of a node that are used separately."""
    nodes_per_switch: int = 0
    """Nodes under one switch (with rails: one switch per rail); 0 means all."""
    oversubscription: float = 1.0
    """Bandwidth of a switch towards its nodes over that towards other switches."""

    @classmethod
    def of(cls, cluster: Cluster) -> NodeTopology:
        """The two levels of a cluster."""
        if cluster.network is None:
            return cls(cluster.node.devices, cluster.node.link, cluster.node.link)
        return cls(cluster.node.devices, cluster.node.link, cluster.network.link)

    def link(self, src: int, dst: int) -> Link:
        """The link of the node, or of the network between nodes as its narrowest port allows."""
        if src // self.devices == dst // self.devices:
            return self.inside
        if self.rails == 1 and self.oversubscription == 1:
            return self.across
        return Link(self.across.alpha, min(self.capacity(port) for port in self.shared(src, dst)))

    def path(self, src: int, dst: int) -> tuple[Port, ...]:
        """The ports of the two devices, or those of the nodes and of their switches."""
        return self.shared(src, dst) or (("device out", src, 0), ("device in", dst, 0))

    def shared(self, src: int, dst: int) -> tuple[Port, ...]:
        """The network ports of the two nodes and the links between their switches; none inside a node."""
        a, b = src // self.devices * self.devices, dst // self.devices * self.devices
        if a == b:
            return ()
        if self.rails == 1:
            rails, out, into = (0, 0), ("node out", a, 0), ("node in", b, 0)
        else:
            rails = ((src - a) * self.rails // self.devices, (dst - b) * self.rails // self.devices)
            out, into = ("rail out", a, rails[0]), ("rail in", b, rails[1])
        switches = self._switch(a), self._switch(b)
        if self.oversubscription == 1 or (switches[0] == switches[1] and rails[0] == rails[1]):
            return out, into
        return out, ("uplink", switches[0], rails[0]), ("downlink", switches[1], rails[1]), into

    def capacity(self, port: Port) -> float:
        """Of a device, of a node's port, or of a switch to the others."""
        if port[0] in ("device out", "device in"):
            return self.inside.bandwidth
        if port[0] in ("uplink", "downlink"):
            return self.across.bandwidth / self.rails * self.nodes_per_switch / self.oversubscription
        return self.across.bandwidth / self.rails

    def period(self, p: int) -> int | None:
        """The ranks of a node, or of a switch if it is oversubscribed; None unless all of them are full."""
        ranks = self.devices * (1 if self.oversubscription == 1 else self.nodes_per_switch)
        return ranks if p % ranks == 0 else None

    def _switch(self, rank: int) -> int:
        """The first rank under the switch of a rank."""
        under = self.devices * self.nodes_per_switch
        return rank // under * under if under else 0


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
        for port in (("out", src, 0), ("in", dst, 0)):
            ranks[port] += message_seconds(m, link)
        for port in topology.shared(src, dst):
            transfers[port] += m / topology.capacity(port)
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
