"""Refuses plans that run, but not on the machines of a question."""

from __future__ import annotations

from dataclasses import replace

from ..clusters import Cluster
from ..core.errors import PlanError
from ..plans import Plan


def check_runs_on(plan: Plan, cluster: Cluster) -> None:
    """Refuse `sync=hogwild` on GPUs and over several hosts, as the engine does: its replicas share a host's memory."""
    if plan.sync_mode != "hogwild":
        return
    hosts = -(-plan.dp // cluster.node.devices)
    if cluster.device.kind == "cpu" and hosts == 1:
        return
    on = "GPUs" if cluster.device.kind != "cpu" else f"{hosts} hosts"
    raise PlanError(
        f"the plan {plan} on {on}",
        where=f"cluster {cluster.name}",
        rule="the replicas of sync=hogwild write to the memory of one host without locks: CPUs of one host",
        fix=f"the nearest plan that runs: {replace(plan, sync='async')}",
    )
