"""Memory of a plan whose replicas do not meet in every step: of a worker, and of the parameter servers on its host.

A worker of `server`, `stale:k` and `async` has weights, gradients and activations, and no optimizer state: that is in
the servers. Replicas of `local:k` and `gossip` have all of it. Those of `hogwild` share weights and state.
"""

from __future__ import annotations

from dataclasses import replace

from ..clusters import Cluster
from ..models.profile import Profile
from ..plans import Plan
from .memory import PeakMemory, peak_memory
from .worker_times import averaged_bytes


def worker_memory(profile: Profile, plan: Plan, n: float, *, device: str) -> PeakMemory:
    """The worst moment of a worker, with micro-batches of n samples."""
    mode, size = plan.sync_mode, float(profile.trained * profile.parameter_bytes)
    if mode in ("server", "stale", "async"):
        most = peak_memory(replace(profile, state_per_parameter=0.0), plan, n, device=device, updates=False)
        return replace(most, communication=most.communication + size)  # gradients, flat, to be sent
    most = peak_memory(profile, plan, n, device=device)
    if mode == "hogwild":
        return replace(most, parameters=most.parameters / plan.dp, optimizer=most.optimizer / plan.dp)
    if mode == "gossip":
        neighbours = 1 if plan.sync == "gossip:random" else min(2, plan.dp - 1)
        return replace(most, communication=most.communication + neighbours * size)
    outer = 2 * size if plan.outer != "none" else 0.0  # the weights of the last average, and the momentum
    buffer = min(float(plan.bucket), averaged_bytes(profile, plan)) if plan.dp > 1 else 0.0
    return replace(most, optimizer=most.optimizer + outer, communication=most.communication + buffer)


def server_bytes(profile: Profile, plan: Plan) -> float:
    """Bytes of one parameter server: its share of weights, optimizer state and gradients that wait for their step.

    A step is summed in the order of its slices, so all of them are kept until it is complete; of `stale:k`, those of
    k more steps as well.
    """
    if not plan.has_coordinator or plan.sync_mode == "hogwild":
        return 0.0
    kept = plan.dp * (plan.sync_steps + 1) if plan.sync_mode in ("server", "stale") else 1
    numbers = profile.trained / plan.servers
    return numbers * ((2 + kept) * profile.parameter_bytes + profile.state_per_parameter)


def servers_of_busiest_host(plan: Plan, cluster: Cluster) -> int:
    """Servers on the host that has the most of them: they are spread over the hosts of the workers."""
    return -(-plan.servers // -(-plan.dp // cluster.node.devices))


def server_memory(profile: Profile, plan: Plan, cluster: Cluster, worker: float) -> tuple[float, float]:
    """(bytes of the servers on one host, bytes available to them); zeros where there are none, or nothing is known.

    On a CPU they share the memory of the host with its workers, of `worker` bytes each; next to GPUs they have it.
    """
    needed = server_bytes(profile, plan) * servers_of_busiest_host(plan, cluster)
    device = cluster.device
    if not needed or (device.kind == "cuda" and device.host is None):
        return 0.0, 0.0
    if device.kind == "cuda":
        assert device.host is not None
        return needed, device.host.memory * cluster.node.devices
    here = min(plan.dp, cluster.node.devices)
    whole = max(0.0, device.memory - device.context) * cluster.node.devices
    return needed, max(0.0, whole - here * worker)
