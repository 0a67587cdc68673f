"""When nothing fits: the rule that was broken, and the cheapest change that would help."""

from __future__ import annotations

import dataclasses

from ..cluster import Cluster
from ..cost import Estimate, estimate
from ..errors import ClusterError
from ..model.profile import Profile
from ..plan import Plan
from ..units import format_bytes
from .space import candidates


def rule(least: Estimate) -> str:
    """The inequality that fails, for the plan that needs least."""
    parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in least.memory_parts.items() if v)
    needed, limit = format_bytes(least.memory_bytes), format_bytes(least.memory_limit)
    return f"{least.plan} needs least: {needed} > {limit} ({parts})"


def change(profile: Profile, cluster: Cluster, least: tuple[Plan, Estimate], fleet: Cluster) -> str:
    """The cheapest of: more devices, a smaller batch, more memory."""
    plan, e = least
    devices = _devices(profile, cluster.devices, fleet, plan)
    if devices:
        return f"--devices {devices}: {devices} such devices hold it"
    batch = _batch(profile, cluster, plan)
    if batch:
        return f"a batch of {batch} samples instead of {profile.batch_size} fits"
    needed = e.memory_bytes + cluster.device.context
    return f"devices with {format_bytes(needed)} (--memory {needed / 2**30:.1f}GiB), or a smaller model"


def _devices(profile: Profile, n: int, fleet: Cluster, plan: Plan) -> int:
    """The least doubling of the devices on which some plan fits, or 0 within 64 times as many."""
    for _ in range(6):
        n *= 2
        try:
            larger = fleet.with_devices(n)
        except ClusterError:
            return 0
        base = Plan(precision=plan.precision)
        for candidate in candidates(profile, n, base):
            whole = candidate.dp == n and candidate.zero == 3
            if whole and estimate(profile, candidate, larger).fits:
                return n
    return 0


def _batch(profile: Profile, cluster: Cluster, plan: Plan) -> int:
    """The largest halving of the batch that fits under the same plan, or 0."""
    batch = profile.batch_size // 2
    while batch >= plan.dp:
        smaller = dataclasses.replace(profile, batch_size=batch)
        if estimate(smaller, dataclasses.replace(plan, micro=1), cluster).fits:
            return batch
        batch //= 2
    return 0
