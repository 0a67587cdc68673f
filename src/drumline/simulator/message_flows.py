"""Messages of a step as flows over links: a start-up, which occupies none, then bytes through ports.

A flow is counted in seconds of its links at full bandwidth, so that every port has capacity 1, and the flow alone takes
the seconds that the cost model gives it. All ranks of a pipeline stage do the same: a port stands for those of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..clusters import Cluster, Link
from ..costs.data_parallel_comm import CollectiveMessage
from ..costs.link_traffic import GroupTraffic, bytes_by_level, replica_traffic
from ..plans import Plan
from ..theory.alpha_beta import Port, UniformTopology

WHOLE_LINKS = UniformTopology(Link(0.0, 1.0))
"""The topology of flows: every port passes one second of messages per second."""


@dataclass(frozen=True, slots=True)
class Leg:
    """The part of a message that passes the links of one level."""

    ports: tuple[Port, ...]
    seconds: float
    """At full bandwidth."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One message, or one collective, as the links see it."""

    startup: float
    """Seconds in which it occupies no link: start-ups, and what it takes beyond its bytes at full bandwidth."""
    legs: tuple[Leg, ...] = ()
    """One after the other."""

    @property
    def seconds(self) -> float:
        """Alone on its links."""
        return self.startup + sum(leg.seconds for leg in self.legs)

    @property
    def ports(self) -> set[Port]:
        """All that it passes."""
        return {port for leg in self.legs for port in leg.ports}


def flow_of(seconds: float, legs: Iterable[tuple[tuple[Port, ...], float]]) -> Flow:
    """A message that takes `seconds` alone, and occupies links for these seconds at their full bandwidth.

    If the links would need longer than the message takes, each counts for its share of the message.
    """
    occupied = [(ports, s) for ports, s in legs if s > 0]
    whole = sum(s for _, s in occupied)
    if whole <= seconds:
        return Flow(seconds - whole, tuple(Leg(ports, s) for ports, s in occupied))
    return Flow(0.0, tuple(Leg(ports, seconds * s / whole) for ports, s in occupied))


@dataclass(frozen=True, slots=True)
class StagePorts:
    """The ports of the ranks of each pipeline stage on a cluster."""

    plan: Plan
    cluster: Cluster

    def group_flow(self, seconds: float, traffic: Iterable[GroupTraffic], stage: int) -> Flow:
        """Collectives among the ranks of a stage, each of which sends and receives."""
        legs = []
        for t in traffic:
            for level, size in bytes_by_level(t, self.cluster):
                ports = (self._port(level, "out", stage), self._port(level, "in", stage))
                legs.append((ports, size / self._bandwidth(level)))
        return flow_of(seconds, legs)

    def collective_flow(self, message: CollectiveMessage, seconds: float, stage: int) -> Flow:
        """A data-parallel collective of a stage."""
        return self.group_flow(seconds, replica_traffic(message, self.plan, 1), stage)

    def send_flow(self, seconds: float, size: float, src: int, dst: int) -> Flow:
        """Messages of all ranks of one stage to those of another; `size` bytes each."""
        stride = self.plan.ranks // self.plan.pp
        level = "node" if self._node(src) == self._node(dst) else "network"
        size *= min(stride, self.cluster.node.devices) if level == "network" else 1
        ports = (self._port(level, "out", src), self._port(level, "in", dst))
        return flow_of(seconds, [(ports, size / self._bandwidth(level))])

    def _port(self, level: str, direction: str, stage: int) -> Port:
        """Of the first rank of a stage, which does what all others do."""
        if level == "node":
            return (f"device {direction}", stage * self.plan.ranks // self.plan.pp, 0)
        return (f"node {direction}", self._node(stage), 0)

    def _node(self, stage: int) -> int:
        return stage * (self.plan.ranks // self.plan.pp) // self.cluster.node.devices

    def _bandwidth(self, level: str) -> float:
        network = self.cluster.network
        return network.link.bandwidth if level == "network" and network else self.cluster.node.link.bandwidth
