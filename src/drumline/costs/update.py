"""The update: the norm of the gradients, the check that they are finite, and the optimizer, on device or host."""

from __future__ import annotations

import math

from ..clusters import DeviceSpec
from ..models.profile import Profile
from ..plans import Plan
from .host import copy_seconds, stream_seconds
from .memory import FUSED
from .work import Pricer

GROUP = 32
"""Tensors that one kernel of torch's works on; it depends on how many operands there are."""


def update_seconds(profile: Profile, plan: Plan, device: DeviceSpec, pricer: Pricer) -> float:
    """What a rank does between its last gradient and its updated numbers."""
    checks = [1.0 * profile.parameter_bytes]  # the norm reads every gradient
    if plan.precision == "fp16":
        checks.append(2.0 * profile.parameter_bytes)  # undoing the loss scale reads and writes them, and looks
    if plan.offload == "all":
        return _on_host(profile, plan, device, sum(checks))
    passes = [(moved, 0.0) for moved in checks]
    if plan.offload == "none":
        return _on_device(profile, plan, device, pricer, [*passes, (profile.optimizer_bytes, profile.optimizer_ops)])
    size = profile.trained * profile.parameter_bytes / plan.shards
    there_and_back = 2 * copy_seconds(size, device)
    return _on_device(profile, plan, device, pricer, passes) + there_and_back + _on_host(profile, plan, device, 0.0)


def _on_device(
    profile: Profile, plan: Plan, device: DeviceSpec, pricer: Pricer, passes: list[tuple[float, float]]
) -> float:
    """Passes of (bytes per number, operators per tensor, 0 where it only reads) over what this rank updates."""
    if device.kind == "cuda":
        return sum(_in_groups(profile, plan, device, pricer, moved, ops) for moved, ops in passes)
    fewer = _pieces(profile, plan) / max(1, profile.tensors)
    size = 1.0 / (plan.shards * fewer) if fewer else 1.0  # of a piece, as a share of a whole tensor
    return fewer * sum(
        x.repeats * pricer.update_seconds(x, moved, ops, size) for x in profile.layers for moved, ops in passes
    )


def _in_groups(profile: Profile, plan: Plan, device: DeviceSpec, pricer: Pricer, moved: float, ops: float) -> float:
    """A GPU works on many tensors with one kernel, as torch's optimizers do there of their own accord."""
    ops = 1.0 if ops <= FUSED else ops  # what is beside a fused kernel counts steps
    calls = ops * max(1.0, _pieces(profile, plan) / GROUP)
    each = profile.trained / plan.shards * moved / calls
    least = pricer.least or device.launch  # where kernels were measured, what the smallest takes: the host is ahead
    once = max(least, each / pricer.memory_rate("update", max(each, 1.0)))
    return calls * once * device.in_step_slowdown.get("update", 1.0)


def _pieces(profile: Profile, plan: Plan) -> float:
    """Tensors that a rank updates: zero=3 cuts each of them, flat shards cut a bucket where one ends."""
    if plan.zero == 3 or plan.shards == 1:
        return profile.tensors
    buckets = math.ceil(profile.trained * profile.parameter_bytes / plan.bucket)
    return (profile.tensors + buckets * (plan.shards - 1)) / plan.shards


def _on_host(profile: Profile, plan: Plan, device: DeviceSpec, checks: float) -> float:
    """The optimizer in host memory, at the rate of that memory; a CPU takes about as long to start an operator."""
    numbers = profile.trained / plan.shards
    calls = _pieces(profile, plan) * max(1.0, profile.optimizer_ops) * device.launch
    return max(calls, stream_seconds(numbers * (profile.optimizer_bytes + checks), device))
