"""Seconds of one worker's task where replicas do not meet in every step (`sync`): its compute, its messages with the
parameter servers or its neighbours, and the servers' own work. The estimate adds them up, the simulator replays them.

A message between a worker and its servers goes through sockets: unix sockets on one host, TCP between hosts. It is
copied once on each side. On a CPU cluster the links are those that were measured between its ranks; the links of GPUs
do not connect hosts, so there the host's copies and sockets count.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import Cluster, Link
from ..models.profile import Profile
from ..plans import Plan
from ..theory.alpha_beta import level
from ..theory.roofline import MEMORY_EFFICIENCY
from .collectives import collective_seconds, slowest_hop
from .tuning import HOST_BANDWIDTH, REQUEST_SECONDS, SOCKET_ALPHA, SOCKET_BANDWIDTH, UPDATE_SECONDS

ACCUMULATED = 3.0
"""Bytes that a server moves to add a byte of gradients to its sum: two read, one written."""
OUTER_STEP = 7.0
"""Bytes that `outer=nesterov` moves for a byte of weights: average, anchor and momentum read, two of them written, and
their difference."""


@dataclass(frozen=True, slots=True)
class TaskCompute:
    """Seconds of one task on a worker's device, at the usual speed."""

    forward: float
    backward: float
    """Without recomputation."""
    recompute: float
    overhead: float
    """Between two tasks: a GPU's host reads the loss before it starts the next."""
    update: float
    """The optimizer on all parameters, where the worker runs it."""

    @property
    def passes(self) -> float:
        """All but the update."""
        return self.forward + self.backward + self.recompute + self.overhead

    def parts(self) -> dict[str, float]:
        """By the parts of an `Estimate`."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "recompute": self.recompute,
            "overhead": self.overhead,
        }


@dataclass(frozen=True, slots=True)
class ServerTransfer:
    """One worker's message to or from all servers, which share its bytes."""

    latency: float
    """Until the first byte arrives; those of several workers overlap."""
    own: float
    """Seconds that the worker takes for all bytes with no other worker communicating."""
    service: float
    """Seconds of the busiest server's port for its share of them."""

    @property
    def alone(self) -> float:
        """Seconds of the message with no other worker communicating."""
        return self.latency + max(self.own, self.service)


NO_TRANSFER = ServerTransfer(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class AveragingTimes:
    """Seconds of the averages of `sync=local:k` and `gossip`."""

    inside: float
    """Of one average: inside the hosts if `across` is set, else over all replicas; of gossip, with the neighbours."""
    across: float
    """Over all hosts; 0 unless `across` is set."""
    bytes: float


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """One worker's task, and what servers do with it."""

    compute: TaskCompute
    ask: float
    """From asking for a task to having it."""
    pull: ServerTransfer
    push: ServerTransfer
    accumulate: float
    """A server's seconds to add one gradient to those of its step."""
    update: float
    """A server's seconds for one update of its share; 0 where workers update."""
    averaging: AveragingTimes
    message_bytes: float
    """Of the gradients, and of the weights."""


def worker_times(profile: Profile, plan: Plan, cluster: Cluster, compute: TaskCompute) -> WorkerTimes:
    """The times of a plan with `sync` other than `allreduce`."""
    size = float(profile.trained * profile.parameter_bytes)
    ask = 2 * worker_link(plan, cluster).alpha + REQUEST_SECONDS if plan.has_coordinator else 0.0
    transfer, accumulate, update = NO_TRANSFER, 0.0, 0.0
    if plan.has_coordinator and plan.sync_mode != "hogwild":
        transfer = server_transfer(size, plan, cluster)
        accumulate = ACCUMULATED * size / plan.servers / host_rate(cluster) if plan.slices > 1 else 0.0
        update = server_update_seconds(profile, plan, cluster, compute)
    return WorkerTimes(
        compute, ask, transfer, transfer, accumulate, update, averaging_times(profile, plan, cluster), size
    )


def worker_link(plan: Plan, cluster: Cluster) -> Link:
    """The link of one worker to a server: on one host if all workers share one."""
    inside = level(plan.dp, cluster)
    if cluster.device.kind == "cpu":
        if inside is not None:
            return inside
        assert cluster.network is not None
        return Link(cluster.network.link.alpha, cluster.network.port_bandwidth)
    if inside is not None:
        return Link(SOCKET_ALPHA, SOCKET_BANDWIDTH)
    assert cluster.network is not None
    return Link(cluster.network.link.alpha, min(cluster.network.port_bandwidth, SOCKET_BANDWIDTH))


def server_transfer(size: float, plan: Plan, cluster: Cluster) -> ServerTransfer:
    """A worker's gradients to the servers, or the weights back: as many bytes.

    Servers are spread over the hosts of the workers. Workers on a server's own host do not use its network port.
    """
    link, hosts = worker_link(plan, cluster), -(-plan.dp // cluster.node.devices)
    copied = 2.0 / host_rate(cluster)  # seconds per byte, read and written
    on_device = 0.0
    if cluster.device.kind == "cuda":
        on_device = 1.0 / (cluster.device.host.copy if cluster.device.host else HOST_BANDWIDTH)
    wire = link.beta
    if hosts > 1:
        assert cluster.network is not None
        here = min(plan.dp, cluster.node.devices)
        servers_of_host = -(-plan.servers // hosts)
        wire = servers_of_host * (plan.dp - here) / plan.dp / cluster.network.link.bandwidth
    own = size * (link.beta + copied + on_device)
    # in the middle of a step a message waits until the process that it is for gets a core
    return ServerTransfer(max(link.alpha, cluster.mid_step_message_s), own, size / plan.servers * (wire + copied))


def host_rate(cluster: Cluster) -> float:
    """Bytes per second that a process on a host reads and writes in long streams."""
    device = cluster.device
    if device.kind == "cuda":
        return MEMORY_EFFICIENCY * (device.host.bandwidth if device.host else HOST_BANDWIDTH)
    curve = device.curve_of("pointwise", "fp32")
    return curve.rates[-1] if curve else MEMORY_EFFICIENCY * device.bandwidth


def server_update_seconds(profile: Profile, plan: Plan, cluster: Cluster, compute: TaskCompute) -> float:
    """One update of a server's share: as a CPU worker would do it, or in the memory of a GPU's host."""
    if cluster.device.kind == "cpu":
        return UPDATE_SECONDS + compute.update / plan.servers
    moved = profile.optimizer_bytes + profile.parameter_bytes  # the norm reads every gradient
    calls = profile.tensors * max(1.0, profile.optimizer_ops) * cluster.device.launch
    return UPDATE_SECONDS + max(calls, profile.trained * moved / host_rate(cluster)) / plan.servers


# -- averages between replicas


def averaged_bytes(profile: Profile, plan: Plan) -> float:
    """Bytes that one average of `sync=local:k` or `gossip` covers: weights, and of local steps the optimizer's states.

    Gossip averages weights alone, as D-PSGD does.
    """
    states = profile.state_per_parameter if plan.sync_mode == "local" else 0.0
    return profile.trained * (profile.parameter_bytes + states)


def averaging_times(profile: Profile, plan: Plan, cluster: Cluster) -> AveragingTimes:
    """Seconds of the averages of a plan; zero where it has none."""
    size, least = averaged_bytes(profile, plan), cluster.mid_step_message_s
    if plan.sync_mode == "gossip":
        return AveragingTimes(max(least, gossip_seconds(size, plan, cluster)) if plan.dp > 1 else 0.0, 0.0, size)
    if plan.sync_mode != "local" or plan.dp == 1:
        return AveragingTimes(0.0, 0.0, 0.0)
    everyone = max(least, collective_seconds("all_reduce", plan.dp, size, cluster))
    outer = _outer_seconds(profile, plan, cluster)
    if not plan.across:
        return AveragingTimes(everyone + outer, 0.0, size)
    here = min(plan.dp, cluster.node.devices)
    inside = max(least, collective_seconds("all_reduce", here, size, cluster))
    return AveragingTimes(inside, everyone + outer, size)


def gossip_seconds(size: float, plan: Plan, cluster: Cluster) -> float:
    """An exchange of weights with both neighbours on the ring, one after the other, or with one random partner."""
    if plan.dp == 1:
        return 0.0
    neighbours = 1 if plan.sync == "gossip:random" else min(2, plan.dp - 1)
    link = slowest_hop(plan.dp, 1, cluster)
    if plan.sync == "gossip:random" and level(plan.dp, cluster) is None:
        # partners are anywhere: all of a node's ranks use its port at once
        link = Link(link.alpha, link.bandwidth / cluster.node.devices)
    mixed = (neighbours + 2) * size / _device_rate(cluster)
    return link.alpha + neighbours * size * link.beta + mixed


def _outer_seconds(profile: Profile, plan: Plan, cluster: Cluster) -> float:
    """The outer optimizer, once per average."""
    if plan.outer == "none":
        return 0.0
    return OUTER_STEP * profile.trained * profile.parameter_bytes / _device_rate(cluster)


def _device_rate(cluster: Cluster) -> float:
    """Bytes per second that a device reads and writes in long streams."""
    return host_rate(cluster) if cluster.device.kind == "cpu" else MEMORY_EFFICIENCY * cluster.device.bandwidth
