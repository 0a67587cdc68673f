"""A replayed collective as text: its time next to the formula, its links, and how busy they are."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..clusters import Link
from ..core.units import format_bytes, format_rate, format_seconds
from ..simulator import ClusterCollective
from ..theory.alpha_beta import PairTopology
from ..theory.topologies import topology_word


def collective_lines(collective: ClusterCollective, title: str) -> str:
    """Lines for a narrow screen."""
    replay = collective.replay
    lines = [
        collective.counts(),
        f"{title}: {format_seconds(replay.seconds)}",
        f"{collective.formula}: {format_seconds(collective.formula_seconds)}",
        *_links(collective),
    ]
    if replay.link_use:
        busiest = replay.link_use[0]
        lines.append(
            f"busiest link: {busiest.name}, {100 * busiest.utilisation:.0f}% of its bandwidth "
            f"({format_bytes(busiest.bytes)})"
        )
    if replay.kinds is not None:
        lines.append(f"replayed: {replay.kinds} ranks, which stand for all {collective.schedule.p}")
    return "\n".join(lines)


def collective_table(collective: ClusterCollective) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "ranks": collective.schedule.p,
        "bytes": collective.bytes,
        "nodes": collective.nodes,
        "topology": topology_word(collective.cluster) if collective.nodes > 1 else "",
        "formula_seconds": collective.formula_seconds,
        "formula": collective.formula,
        "links": [dataclasses.asdict(use) for use in collective.replay.link_use],
        "kinds_of_ranks": collective.replay.kinds,
    }


def _links(collective: ClusterCollective) -> list[str]:
    """The links that the ranks use."""
    cluster = collective.cluster
    if isinstance(collective.topology, PairTopology):
        return ["links between ranks, as measured"]
    inside = f"node link: {_link(cluster.node.link)} a device"
    if collective.nodes == 1 or cluster.network is None:
        return [inside]
    across = f"network ({topology_word(cluster)}): {_link(cluster.network.link)} a node"
    return [across] if cluster.node.devices == 1 else [inside, across]


def _link(link: Link) -> str:
    kind = f"{link.type}, " if link.type else ""
    return f"{kind}{format_seconds(link.alpha)}, {format_rate(link.bandwidth)}"
