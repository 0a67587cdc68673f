"""When nothing fits: the rule that was broken, and the cheapest change that would help."""

from __future__ import annotations

import dataclasses

from ..cluster import Cluster
from ..cost import Estimate, Steps
from ..errors import ClusterError
from ..model.profile import Profile
from ..plan import Plan
from ..units import format_bytes
from .space import candidates, micro_batches, recomputations, smaller
from .splitting import splits


def least(profile: Profile, cluster: Cluster, base: Plan) -> tuple[Plan, Estimate]:
    """The plan that comes nearest to fitting, of all that there are: also those that the search did not look at."""
    steps = Steps(profile, cluster, base.precision)
    # whatever is offloaded is taken for fitting, so that all of it is offered
    every = candidates(profile, cluster, base, lambda plan: plan.offload != "none")
    plan = min(every, key=lambda plan: (steps.excess(plan), steps.memory(plan).total))
    return plan, steps.estimate(plan)


def rule(least: Estimate) -> str:
    """The inequality that fails, for the plan that needs least."""
    if least.lacks[0] == "host":
        needed, limit = format_bytes(least.host_bytes), format_bytes(least.host_limit)
        return f"{least.plan} needs least: {needed} > {limit} of host memory"
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
    if e.lacks[0] == "host":
        return f"hosts with {format_bytes(e.host_bytes)} a rank (device.host.memory), or a smaller model"
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
        fits = Steps(profile, larger, plan.precision).fits
        for micro in micro_batches(profile, n):
            for recompute in recomputations(profile):
                whole = Plan(dp=n, zero=3, micro=micro, recompute=recompute, precision=plan.precision)
                if any(fits(p) for p in (whole, *smaller(whole, larger, fits))):
                    return n
        if any(fits(p) for p in splits(profile, larger, Plan(precision=plan.precision))):
            return n
    return 0


def _batch(profile: Profile, cluster: Cluster, plan: Plan) -> int:
    """The largest halving of the batch that fits under the same plan, or 0."""
    batch = profile.batch_size // 2
    while batch >= plan.dp:
        smaller = dataclasses.replace(profile, batch_size=batch)
        if Steps(smaller, cluster, plan.precision).fits(dataclasses.replace(plan, micro=1)):
            return batch
        batch //= 2
    return 0
