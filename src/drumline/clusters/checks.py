"""What a cluster file may say in the right form and still not mean: a number whose unit was forgotten or mixed up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import ClusterError
from .lines import line_of

if TYPE_CHECKING:
    from .spec import Cluster

SLOWEST = 1e4
"""Bytes per second below which nothing is a link or a memory: 300 was meant to be 300GB/s."""
LONGEST = 1.0
"""Seconds above which nothing is a start-up: 3 was meant to be 3us."""
SMALLEST = 1e6
"""Bytes below which nothing is a device's memory: 40 was meant to be 40GB."""


def plausible(cluster: Cluster, where: str) -> None:
    """Refuse numbers that no machine has, by key."""
    rates = {"device.bandwidth": cluster.device.bandwidth, "node.link.bandwidth": cluster.node.link.bandwidth}
    times = {"device.launch": cluster.device.launch, "node.link.alpha": cluster.node.link.alpha}
    if cluster.network is not None:
        rates["network.link.bandwidth"] = cluster.network.link.bandwidth
        times["network.link.alpha"] = cluster.network.link.alpha
    for key, rate in rates.items():
        if rate < SLOWEST:
            raise _refused(key, f"{rate:g} bytes per second", f"at least {SLOWEST:g}", '"300GB/s"', where)
    for key, seconds in times.items():
        if seconds > LONGEST:
            raise _refused(key, f"{seconds:g} seconds", f"at most {LONGEST:g}", '"3us"', where)
    if cluster.device.memory < SMALLEST:
        size = f"{cluster.device.memory:g} bytes"
        raise _refused("device.memory", size, f"at least {SMALLEST:g}", '"40GB"', where)


def one_kind(table: Mapping[str, Any], where: str) -> None:
    """Refuse several kinds of devices or nodes: a plan gives all ranks equal shares, so the slowest sets the pace."""
    for key in ("device", "node", "network"):
        if isinstance(table.get(key), list):
            raise ClusterError(
                f"{len(table[key])} kinds of {key}",
                where=f"{where}: {key}",
                rule="a cluster has one kind of device, in nodes that are alike",
                fix="plan for each kind alone; or for all, as if each were the slowest and smallest: ranks wait for it",
            )


def at_line(error: ClusterError, text: str) -> ClusterError:
    """The same error with the line of the key that it names, in the text of the file."""
    line = line_of(text, error.where.rpartition(": ")[2])
    where = f"{error.where} (line {line})" if line else error.where
    return ClusterError(error.what, where=where, rule=error.rule, fix=error.fix)


def _refused(key: str, value: str, rule: str, example: str, where: str) -> ClusterError:
    return ClusterError(
        f"{key}: {value} cannot be meant",
        where=f"{where}: {key}",
        rule=f"{rule}; is a unit missing?",
        fix=f"{key.rpartition('.')[2]} = {example}",
    )
