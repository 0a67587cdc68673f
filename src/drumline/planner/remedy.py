"""When nothing fits: the rule that was broken, the cheapest change that would help, and what remains if none does."""

from __future__ import annotations

import dataclasses

from ..clusters import Cluster
from ..core.errors import ClusterError
from ..core.units import format_bytes
from ..costs import Estimate, Steps
from ..models.profile import Profile
from ..plans import Plan
from ..theory.roofline import BYTES_PER_VALUE
from .prices import prices
from .space import candidates, micro_batches, recomputations, smaller
from .splitting import splits


def least(profile: Profile, cluster: Cluster, base: Plan) -> tuple[Plan, Estimate]:
    """The plan that comes nearest to fitting, of all that there are: also those that the search did not look at."""
    steps = prices(profile, cluster, base.precision)
    every = candidates(profile, cluster, base, sparing=True)
    plan = min(every, key=lambda plan: (steps.excess(plan), steps.memory(plan).total))
    return plan, steps.estimate(plan)


def rule(profile: Profile, least: Estimate) -> str:
    """The inequality that fails, for the plan that needs least."""
    if least.lacks[0] == "host":
        needed, limit = format_bytes(least.host_bytes), format_bytes(least.host_limit)
        told = f"{least.plan} needs least: {needed} > {limit} of host memory"
    else:
        parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in least.memory_parts.items() if v)
        needed, limit = format_bytes(least.memory_bytes), format_bytes(least.memory_limit)
        told = f"{least.plan} needs least: {needed} > {limit} ({parts})"
    large = too_large(profile, least)
    return f"{told}; {large}" if large else told


def too_large(profile: Profile, e: Estimate) -> str:
    """The largest layer, where it alone, as it is computed with, is larger than a device; else nothing."""
    width = min(profile.parameter_bytes, BYTES_PER_VALUE[Plan.parse(e.plan).precision])
    layer = max(profile.layers, key=lambda x: x.parameters + x.frozen)
    size = (layer.parameters + layer.frozen) * width
    if size <= e.memory_limit:
        return ""
    return (
        f"the largest layer, {layer.name or profile.name}, has {format_bytes(size)} of parameters, "
        f"more than the {format_bytes(e.memory_limit)} of a device"
    )


def change(profile: Profile, cluster: Cluster, least: tuple[Plan, Estimate], fleet: Cluster) -> str:
    """The cheapest of: more devices, a smaller batch, more memory; or what remains."""
    plan, e = least
    devices = more_devices(profile, cluster.devices, fleet, plan)
    if devices:
        return f"--devices {devices}: {devices} such devices hold it"
    batch = smaller_batch(profile, cluster, plan)
    if batch:
        return f"a batch of {batch} samples instead of {profile.batch_size} fits"
    return what_remains(profile, cluster, e)


def what_remains(profile: Profile, cluster: Cluster, e: Estimate) -> str:
    """Where neither devices nor batches help."""
    if e.lacks[0] == "host":
        larger = f"hosts with {format_bytes(e.host_bytes)} a rank (device.host.memory)"
    else:
        needed = e.memory_bytes + cluster.device.context
        larger = f"devices with {format_bytes(needed)} (--memory {needed / 2**30:.1f}GiB)"
    ways = [larger]
    if cluster.device.kind == "cuda" and cluster.device.host is None:
        ways.append("host memory for its states (device.host in the cluster file; then offload is tried)")
    ways.append("a smaller or pruned model")
    if cluster.device.kind == "cuda":
        states = profile.trained * (2 * profile.parameter_bytes + profile.state_per_parameter)
        ways.append(f"training on CPUs with more than {format_bytes(states)} of memory in all")
    return "; or ".join(ways)


def more_devices(profile: Profile, n: int, fleet: Cluster, plan: Plan) -> int:
    """The least doubling of the devices on which some plan fits, or 0 within 64 times as many."""
    for _ in range(6):
        n *= 2
        try:
            larger = fleet.with_devices(n)
        except ClusterError:
            return 0
        if some_plan_fits(profile, larger, plan.precision):
            return n
    return 0


def some_plan_fits(profile: Profile, cluster: Cluster, precision: str) -> bool:
    """Whether there is any plan that fits, without pricing time: the most sharded ones first, then split models."""
    fits = Steps(profile, cluster, precision).fits
    n = cluster.devices
    for dp in sorted({min(n, profile.batch_size), 1}, reverse=True):
        for micro in micro_batches(profile, dp):
            for recompute in recomputations(profile):
                whole = Plan(dp=dp, zero=3 if dp > 1 else 0, micro=micro, recompute=recompute, precision=precision)
                if any(fits(p) for p in (whole, *smaller(whole, cluster, fits))):
                    return True
    return any(fits(p) for p in splits(profile, cluster, Plan(precision=precision)))


def smaller_batch(profile: Profile, cluster: Cluster, plan: Plan) -> int:
    """The largest halving of the batch that fits under the same plan, or 0."""
    batch = profile.batch_size // 2
    while batch >= plan.dp:
        smaller = dataclasses.replace(profile, batch_size=batch)
        if Steps(smaller, cluster, plan.precision).fits(dataclasses.replace(plan, micro=1)):
            return batch
        batch //= 2
    return 0
