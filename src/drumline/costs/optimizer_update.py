"""The optimizer update on the device or on its host, and what offloading to host memory costs.

An update is the norm of the gradients, the check that they are finite, and the optimizer itself.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..clusters import Cluster, DeviceSpec, HostMemory
from ..core.errors import ClusterError
from ..models.profile import Profile
from ..plans import Plan
from ..theory.roofline import MEMORY_EFFICIENCY
from .kernel_time import Pricer
from .tuning import FUSED_OPS, ROUNDING_BYTES, TENSORS_PER_KERNEL


def effective_plan(plan: Plan, cluster: Cluster) -> Plan:
    """The plan as these devices run it: a CPU has everything in host memory already, so offloading moves nothing."""
    if plan.offload != "none" and cluster.device.kind == "cpu":
        return replace(plan, offload="none")
    return plan


def host_memory(device: DeviceSpec) -> HostMemory:
    """The host memory of a device; raises ClusterError if the cluster does not describe it."""
    if device.host is None:
        raise ClusterError(
            f"offloading from {device.name} cannot be priced",
            rule="device.host gives the memory of the host and the rates to it; it is not given",
            fix="add [device.host] with memory, bandwidth and copy to the cluster file, or offload=none",
        )
    return device.host


def host_bytes(profile: Profile, plan: Plan) -> float:
    """Bytes of one rank's tensors in host memory: state, and a value and a gradient of every number that it updates.

    With offload=all the frozen parameters are there as well.
    """
    if plan.offload == "none":
        return 0.0
    width = profile.parameter_bytes
    frozen = (profile.parameters - profile.trained) * width if plan.offload == "all" else 0.0
    return (profile.trained * (2 * width + profile.state_per_parameter) + frozen) / plan.shards


def copy_seconds(size: float, device: DeviceSpec) -> float:
    """Copy `size` bytes between host and device, one way."""
    return size / host_memory(device).copy


def host_stream_seconds(size: float, device: DeviceSpec) -> float:
    """Read or write `size` bytes of host memory on the host."""
    return size / (MEMORY_EFFICIENCY * host_memory(device).bandwidth)


def host_accumulation_seconds(profile: Profile, plan: Plan, device: DeviceSpec) -> float:
    """offload=all: from the second micro-batch on, the host adds gradients to its own, while ranks wait."""
    if plan.offload != "all" or plan.micro == 1:
        return 0.0
    added = 3.0 * profile.trained * profile.parameter_bytes / plan.shards
    return (plan.micro - 1) * host_stream_seconds(added, device)


def update_parts(profile: Profile, plan: Plan, device: DeviceSpec, pricer: Pricer) -> dict[str, float]:
    """Seconds of what a rank does between its last gradient and its updated parameters, in order, by name."""
    checks = [1.0 * profile.parameter_bytes]  # the norm reads every gradient
    if plan.precision == "fp16":
        checks.append(2.0 * profile.parameter_bytes)  # undoing the loss scale reads, checks and writes them
    if plan.offload == "all":
        return {"optimizer on host": _on_host(profile, plan, device, sum(checks))}
    passes = [(moved, 0.0) for moved in checks]
    if plan.precision == "bf16-pure":
        stored = 1 + profile.state_per_parameter / profile.parameter_bytes
        rounding, widening = ROUNDING_BYTES
        # the optimizer's own traffic is in float32: once more than in bf16
        passes.append((profile.optimizer_bytes + rounding * stored + widening * (stored + 1), 0.0))
    if plan.offload == "none":
        passes.append((profile.optimizer_bytes, profile.optimizer_ops))
        return {"optimizer": _on_device(profile, plan, device, pricer, passes)}
    one_way = copy_seconds(profile.trained * profile.parameter_bytes / plan.shards, device)
    return {
        "optimizer norm": _on_device(profile, plan, device, pricer, passes),
        "optimizer copy of gradients to host": one_way,
        "optimizer on host": _on_host(profile, plan, device, 0.0),
        "optimizer copy of parameters to device": one_way,
    }


def _on_device(
    profile: Profile, plan: Plan, device: DeviceSpec, pricer: Pricer, passes: list[tuple[float, float]]
) -> float:
    """Passes of (bytes per number, operators per tensor, 0 where it only reads) over what this rank updates."""
    if device.kind == "cuda":
        return sum(_multi_tensor(profile, plan, device, pricer, moved, ops) for moved, ops in passes)
    fewer = _pieces(profile, plan) / max(1, profile.tensors)
    size = 1.0 / (plan.shards * fewer) if fewer else 1.0  # of a piece, as a share of a whole tensor
    return fewer * sum(
        x.repeats * pricer.update_seconds(x, moved, ops, size) for x in profile.layers for moved, ops in passes
    )


def _multi_tensor(profile: Profile, plan: Plan, device: DeviceSpec, pricer: Pricer, moved: float, ops: float) -> float:
    """On a GPU one kernel updates many tensors, which is the default of torch's optimizers there."""
    ops = 1.0 if ops <= FUSED_OPS else ops  # the other operators of a fused optimizer only count steps
    calls = ops * max(1.0, _pieces(profile, plan) / TENSORS_PER_KERNEL)
    each = profile.trained / plan.shards * moved / calls
    least = pricer.least or device.launch  # where kernels were measured, the time of the smallest: the host is ahead
    once = max(least, each / pricer.memory_rate("update", max(each, 1.0)))
    return calls * once * device.in_step_slowdown.get("update", 1.0)


def _pieces(profile: Profile, plan: Plan) -> float:
    """Tensors that a rank updates: zero=3 shards each of them, flat shards cut a bucket where a shard ends."""
    if plan.zero == 3 or plan.shards == 1:
        return profile.tensors
    buckets = math.ceil(profile.trained * profile.parameter_bytes / plan.bucket)
    return (profile.tensors + buckets * (plan.shards - 1)) / plan.shards


def _on_host(profile: Profile, plan: Plan, device: DeviceSpec, checks: float) -> float:
    """The optimizer in host memory, at the rate of that memory; a CPU takes about as long to start an operator."""
    numbers = profile.trained / plan.shards
    calls = _pieces(profile, plan) * max(1.0, profile.optimizer_ops) * device.launch
    return max(calls, host_stream_seconds(numbers * (profile.optimizer_bytes + checks), device))
