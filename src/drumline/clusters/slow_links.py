"""Slow links: `network:0.5` is a network at half its bandwidth, `node@3:0.5` the links inside node 3 alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import InputError, nearest
from .spec import Cluster

LEVELS = ("node", "network")
SLOWEST_LINK = 1e-4
"""Share of its bandwidth; with less it counts as broken."""
_FORM = (
    "LEVEL:SHARE or LEVEL@NODE:SHARE, such as network:0.5 or node@3:0.5; a level is node or network, a share of its "
    f"bandwidth is from {SLOWEST_LINK:g} to 1"
)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Links of one level at a share of their bandwidth."""

    level: str
    share: float
    node: int | None = None
    """The node whose links are slow; None if all are."""

    @classmethod
    def parse(cls, text: str) -> SlowLink:
        """Read `network:0.5` or `node@3:0.5`."""
        where, colon, share = text.partition(":")
        level, at, node = where.partition("@")
        try:
            slow = cls(level, float(share), int(node) if at else None) if colon else None
        except ValueError:
            slow = None
        if slow is None or not SLOWEST_LINK <= slow.share <= 1 or (slow.node or 0) < 0:
            raise InputError(f"slow link {text!r}", rule=_FORM)
        if level not in LEVELS:
            raise InputError(f"slow link {text!r}", rule=_FORM, fix=nearest(level, LEVELS))
        return slow

    def check(self, cluster: Cluster, plan: str, waits: bool) -> None:
        """Refuse a link that the cluster does not have, and one node's link where ranks do not wait for each other."""
        nodes = cluster.network.nodes if cluster.network else 1
        if self.level == "network" and cluster.network is None:
            raise InputError(
                f"slow link {self}",
                rule=f"{plan} runs on one node of {cluster.name}, which needs no network",
                fix=f"node:{self.share:g}",
            )
        if self.node is not None and self.node >= nodes:
            raise InputError(f"slow link {self}", rule=f"there are {nodes} nodes, from 0 to {nodes - 1}")
        if self.node is not None and not waits:
            raise InputError(
                f"slow link {self} with {plan}",
                rule="one node's link sets the pace of all only where replicas meet in every step",
                fix=f"{self.level}:{self.share:g} for the links of all nodes",
            )

    def change(self, cluster: Cluster) -> str:
        """The change of the cluster's numbers, as for `--set`."""
        link = cluster.node.link if self.level == "node" else cluster.network.link if cluster.network else None
        assert link is not None
        return f"{self.level}.link.bandwidth={self.share * link.bandwidth}"

    def __str__(self) -> str:
        return f"{self.level}{'' if self.node is None else f'@{self.node}'}:{self.share:g}"
