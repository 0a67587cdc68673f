"""Sentences about the messages of a plan that links between nodes slow down, by axis."""

from __future__ import annotations

from collections.abc import Iterator

from ..clusters import Cluster
from ..plans import Plan
from .collectives import axis_group, inner, replicas
from .contention import cluster_contention, limits_messages

_LINKS = {
    "uplink": "the uplinks of switches",
    "downlink": "the downlinks of switches",
    "rail": "single ports of their nodes",
    "torus": "the links of the torus",
}
"""By the first word of the level of links."""


def contention_notes(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """One sentence for each kind of message with less than full bisection bandwidth."""
    if not limits_messages(cluster):
        return ()
    notes = []
    for name, ranks, stride, pattern in _messages(plan, cluster):
        measured = stride == 1 and any(table.ranks == ranks for table in cluster.collective)
        if ranks < 2 or (ranks - 1) * stride < cluster.node.devices or measured:
            continue
        contention = cluster_contention(cluster, ranks, stride, pattern)
        if contention.level:
            links = _LINKS[contention.level.split()[0]]
            notes.append(
                f"{name} share {links}: {contention.factor:.3g}x as long between nodes as at full bisection bandwidth"
            )
    return tuple(notes)


def _messages(plan: Plan, cluster: Cluster) -> Iterator[tuple[str, int, int, str]]:
    """(name, ranks, stride, pattern) of each kind of message, with the pattern by which it is priced."""
    ring = "next" if cluster.device.kind == "cpu" else "across"
    yield "activations between tensor-parallel ranks", *axis_group("tp", plan), ring
    yield "keys and values between context-parallel ranks", *axis_group("cp", plan), "next"
    yield "tokens for experts", *axis_group("ep", plan), "all"
    for axis in ("rows", "columns"):
        yield f"borders between {axis} of tiles", *axis_group(axis, plan), "next"
    yield "messages between pipeline stages", plan.pp, plan.ranks // plan.pp, "next"
    if plan.has_coordinator:
        return  # parameter servers are priced by the port of their node alone
    if plan.zero:
        yield "shards of gradients and parameters", plan.shards, inner(plan), ring
    yield "gradients", *replicas(plan), ring
