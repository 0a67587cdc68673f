"""Offloading: what lies in host memory under a plan, and what it takes to move and to update it there."""

from __future__ import annotations

from dataclasses import replace

from ..clusters import Cluster, DeviceSpec, HostMemory
from ..core.errors import ClusterError
from ..models.profile import Profile
from ..plans import Plan
from ..theory.roofline import MEMORY_EFFICIENCY


def as_it_runs(plan: Plan, cluster: Cluster) -> Plan:
    """The plan as these devices run it: a CPU has everything in host memory already, so offloading moves nothing."""
    if plan.offload != "none" and cluster.device.kind == "cpu":
        return replace(plan, offload="none")
    return plan


def host_of(device: DeviceSpec) -> HostMemory:
    """The host of a device; refuses where nobody has said what it is."""
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
    """So many bytes between host and device, one way."""
    return size / host_of(device).copy


def stream_seconds(size: float, device: DeviceSpec) -> float:
    """So many bytes read or written in host memory by the host."""
    return size / (MEMORY_EFFICIENCY * host_of(device).bandwidth)
