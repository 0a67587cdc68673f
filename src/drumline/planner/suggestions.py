"""Suggestions when nothing fits: the broken rule, the cheapest change that helps, and what remains otherwise."""

from __future__ import annotations

import dataclasses

from ..clusters import Cluster
from ..core.errors import ClusterError
from ..core.units import format_bytes
from ..costs import Estimate, OperatorCostModel, cost_model
from ..models.profile import Profile
from ..plans import Plan
from ..theory.roofline import STORED_BYTES
from .memory_saving import fewest_savings
from .space import SearchSpace, candidates, powers, recomputations, split_candidates


def closest_plan(profile: Profile, cluster: Cluster, base: Plan) -> tuple[Plan, Estimate]:
    """The plan that comes closest to fitting, with every option that saves memory."""
    model = cost_model(profile, cluster, base.precision)
    plans = candidates(profile, cluster, base, model, save_memory=True)
    plan = min(plans, key=lambda plan: (model.excess(plan), model.memory(plan).total))
    return plan, model.estimate(plan)


def broken_rule(profile: Profile, closest: Estimate) -> str:
    """The inequality that the closest plan violates."""
    if closest.lacks[0] == "host":
        needed, limit = format_bytes(closest.host_bytes), format_bytes(closest.host_limit)
        text = f"{closest.plan} needs the least: {needed} > {limit} of host memory"
    else:
        parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in closest.memory_parts.items() if v)
        needed, limit = format_bytes(closest.memory_bytes), format_bytes(closest.memory_limit)
        text = f"{closest.plan} needs the least: {needed} > {limit} ({parts})"
    large = too_large(profile, closest)
    return f"{text}; {large}" if large else text


def too_large(profile: Profile, e: Estimate) -> str:
    """The largest layer, where its parameters alone, in the compute precision, exceed a device; else nothing."""
    width = min(profile.parameter_bytes, STORED_BYTES[Plan.parse(e.plan).precision])
    layer = max(profile.layers, key=lambda x: x.parameters + x.frozen)
    size = (layer.parameters + layer.frozen) * width
    if size <= e.memory_limit:
        return ""
    return (
        f"the largest layer, {layer.name or profile.name}, has {format_bytes(size)} of parameters, "
        f"more than the {format_bytes(e.memory_limit)} of a device"
    )


def suggest(profile: Profile, cluster: Cluster, closest: tuple[Plan, Estimate], fleet: Cluster) -> str:
    """The cheapest of: more devices, a smaller batch, more memory; or what remains."""
    plan, e = closest
    devices = more_devices(profile, cluster.devices, fleet, plan)
    if devices:
        return f"--devices {devices}: it fits on {devices} such devices"
    batch = smaller_batch(profile, cluster, plan)
    if batch:
        return f"a batch of {batch} samples instead of {profile.batch_size} fits"
    return last_resorts(profile, cluster, e)


def last_resorts(profile: Profile, cluster: Cluster, e: Estimate) -> str:
    """Options where neither more devices nor smaller batches help."""
    if e.lacks[0] == "host":
        larger = f"hosts with {format_bytes(e.host_bytes)} {e.host_owner} (device.host.memory)"
    else:
        needed = e.memory_bytes + cluster.device.context
        larger = f"devices with {format_bytes(needed)} (--memory {needed / 2**30:.1f}GiB)"
    options = [larger]
    if cluster.device.kind == "cuda" and cluster.device.host is None:
        options.append("host memory for the model states (device.host in the cluster file; then offload is tried)")
    options.append("a smaller or pruned model")
    if cluster.device.kind == "cuda":
        states = profile.trained * (2 * profile.parameter_bytes + profile.state_per_parameter)
        options.append(f"training on CPUs with more than {format_bytes(states)} of memory in total")
    return "; or ".join(options)


def more_devices(profile: Profile, n: int, fleet: Cluster, plan: Plan) -> int:
    """The smallest doubling of the devices on which some plan fits, or 0 within 64 times as many."""
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
    """Whether any plan fits, without pricing time: the most sharded ones first, then split models."""
    model = OperatorCostModel(profile, cluster, precision)
    for dp in sorted({min(cluster.devices, profile.batch_size), 1}, reverse=True):
        for micro in powers(profile.batch_size // dp):
            for recompute in recomputations(profile):
                plan = Plan(dp=dp, zero=3 if dp > 1 else 0, micro=micro, recompute=recompute, precision=precision)
                if any(model.fits(p) for p in (plan, *fewest_savings(plan, cluster, model.fits))):
                    return True
    base = Plan(precision=precision)
    space = SearchSpace(profile, cluster, base, model)
    return any(model.fits(p) for p in split_candidates(space, base, model.fits))


def smaller_batch(profile: Profile, cluster: Cluster, plan: Plan) -> int:
    """The largest halving of the batch that fits with the same plan, or 0."""
    batch = profile.batch_size // 2
    while batch >= plan.dp:
        smaller = dataclasses.replace(profile, batch_size=batch)
        if OperatorCostModel(smaller, cluster, plan.precision).fits(dataclasses.replace(plan, micro=1)):
            return batch
        batch //= 2
    return 0
