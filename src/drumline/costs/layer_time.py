"""Seconds of every layer of one rank in one micro-batch: its compute, and the messages of its own that it waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..clusters import Cluster
from ..models.profile import Layer, Profile
from ..plans import Plan
from ..theory.roofline import MEMORY_EFFICIENCY
from .collectives import axis_seconds, collective_seconds, copies
from .kernel_time import LaunchAndKernelTime, Pricer
from .rank_model import LayerMessages, RankModel
from .tuning import MOST_DRIFT, STATISTICS_BYTES, UNIT_CALLS, UNIT_COPIES


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Compute of one layer in one micro-batch."""

    layer: Layer
    forward: float
    backward: float
    """With recomputation, if there is any."""
    recompute: float
    """The recomputation in it."""


@dataclass(frozen=True, slots=True)
class LayerCommTime:
    """Seconds of a layer's own messages in one micro-batch."""

    forward: float = 0.0
    """Waiting in the forward."""
    backward: float = 0.0
    hidden: float = 0.0
    """Seconds of messages that run behind the layer's compute."""


@dataclass(frozen=True, slots=True)
class LayerSums:
    """Seconds of all layers of a rank in one micro-batch."""

    forward: float
    backward: float
    """With recomputation."""
    recompute: float
    communication: float
    """Waiting for the layers' own messages."""
    hidden: float

    @classmethod
    def of(cls, times: Sequence[LayerTime], comm: Sequence[LayerCommTime]) -> LayerSums:
        """Add up the layers of a rank without a pipeline."""
        return cls(
            sum(t.forward for t in times),
            sum(t.backward for t in times),
            sum(t.recompute for t in times),
            sum(c.forward + c.backward for c in comm),
            sum(c.hidden for c in comm),
        )


def largest_micro_batch(batch_size: int, plan: Plan) -> int:
    """Samples of the largest micro-batch on the busiest rank."""
    return math.ceil(math.ceil(batch_size / plan.micro) / plan.slices)


def compute_slowdown(plan: Plan, cluster: Cluster) -> float:
    """The factor on a rank's compute: other ranks of its host are idle, or it waits for the slowest."""
    straggler = cluster.with_active_ranks(plan.ranks).straggler_slowdown if plan.ranks > 1 else 1.0
    return cluster.compute_factor(plan.ranks) * straggler


def layer_times(profile: Profile, pricer: Pricer, plan: Plan, n: float, cluster: Cluster) -> list[LayerTime]:
    """The compute of the layers, in the order in which they run, for n samples."""
    slowdown = compute_slowdown(plan, cluster)
    if cluster.device.kind == "cuda":
        return _launched_ahead(profile, pricer, plan, n, slowdown, cluster)
    times: list[LayerTime] = []
    for layer in profile.each():
        forward = slowdown * pricer.layer_seconds(layer, "forward", n)
        recompute = forward if plan.recompute == "full" and layer.composite else 0.0
        if plan.recompute == "selective" and layer.composite:
            recompute = slowdown * pricer.layer_seconds(layer, "again", n)
        backward = slowdown * pricer.layer_seconds(layer, "backward", n) + recompute
        times.append(LayerTime(layer, forward, backward, recompute))
    return times


class _TwoClocks:
    """A GPU and the host that launches its kernels: the host may be ahead; where it is not, the GPU waits for it."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown, self._host, self._device = slowdown, 0.0, 0.0

    def run(self, time: LaunchAndKernelTime) -> float:
        """Run one more layer; by how much later the device is done."""
        before = self._device
        self._host += self._slowdown * time.launch
        self._device = max(self._device + self._slowdown * time.kernel, self._host)
        return self._device - before


def gathers_units(plan: Plan) -> bool:
    """Whether ranks gather the parameters of each unit before it runs, and scatter its gradients after."""
    return plan.zero == 3 and plan.shards > 1


@dataclass(frozen=True, slots=True)
class _UnitOverhead:
    """zero=3 on a GPU: the host's gathers, reductions and hooks around a unit, and the device's copies of it."""

    profile: Profile
    plan: Plan
    cluster: Cluster

    def added_to(self, time: LaunchAndKernelTime, layer: Layer, phase: str) -> LaunchAndKernelTime:
        """The time of one phase of a layer with what its unit adds."""
        if not layer.shard_unit or not layer.parameters:
            return time
        device = self.cluster.device
        call = device.host_overhead.get(phase, device.launch)
        moved = UNIT_COPIES[phase] * layer.parameters * self.profile.parameter_bytes / 4
        copies = moved / (MEMORY_EFFICIENCY * device.bandwidth)
        return LaunchAndKernelTime(time.launch + UNIT_CALLS[phase] * call, time.kernel + copies)


def _launched_ahead(
    profile: Profile, pricer: Pricer, plan: Plan, n: float, slowdown: float, cluster: Cluster
) -> list[LayerTime]:
    """The layers forward, then backward, by both clocks: the lead that the host gains in one layer helps the next."""
    layers = list(profile.each())
    clocks = _TwoClocks(slowdown)
    unit = _UnitOverhead(profile, plan, cluster) if gathers_units(plan) else None

    def run(time: LaunchAndKernelTime, layer: Layer, phase: str) -> float:
        return clocks.run(unit.added_to(time, layer, phase) if unit else time)

    forward = [
        run(pricer.layer_time(layer, "forward", n, recompute=plan.recompute), layer, "forward") for layer in layers
    ]
    times = []
    for layer, before in zip(reversed(layers), reversed(forward), strict=True):
        recompute = 0.0
        if plan.recompute != "none" and layer.composite:
            recompute = clocks.run(_recomputed(layer, pricer, plan, n))
        backward = run(pricer.layer_time(layer, "backward", n), layer, "backward") + recompute
        times.append(LayerTime(layer, before, backward, recompute))
    return times[::-1]


def _recomputed(layer: Layer, pricer: Pricer, plan: Plan, n: float) -> LaunchAndKernelTime:
    """The part of a layer that a plan recomputes before its backward."""
    phase = "again" if plan.recompute == "selective" else "forward"
    return pricer.layer_time(layer, phase, n, recompute=plan.recompute)


def launch_seconds(profile: Profile, pricer: Pricer, plan: Plan, n: float, cluster: Cluster) -> float:
    """Seconds that the host of a GPU takes to launch all kernels of one micro-batch."""
    total = 0.0
    unit = _UnitOverhead(profile, plan, cluster) if gathers_units(plan) else None
    for layer in profile.each():
        times = [pricer.layer_time(layer, "forward", n, recompute=plan.recompute)]
        times.append(pricer.layer_time(layer, "backward", n))
        if unit:
            times = [unit.added_to(t, layer, phase) for t, phase in zip(times, ("forward", "backward"), strict=True)]
        if plan.recompute != "none" and layer.composite:
            times.append(_recomputed(layer, pricer, plan, n))
        total += sum(t.launch for t in times)
    return total


def layer_comm_times(
    rank: RankModel,
    times: Sequence[LayerTime],
    plan: Plan,
    n: float,
    profile: Profile,
    cluster: Cluster,
    pricer: Pricer,
) -> list[LayerCommTime]:
    """The messages of every layer of a rank, repeats one by one; `profile` is the whole model's."""
    comm: list[LayerCommTime] = []
    for layer, messages in zip(rank.profile.layers, rank.messages, strict=True):
        waits = _with_statistics(
            _layer_comm_time(layer, messages, plan, n, profile, cluster, pricer), times[len(comm)], plan, cluster
        )
        comm += [waits] * layer.repeats
    return comm


def _layer_comm_time(
    layer: Layer, messages: LayerMessages, plan: Plan, n: float, profile: Profile, cluster: Cluster, pricer: Pricer
) -> LayerCommTime:
    if not messages:
        return LayerCommTime()
    seconds = {"forward": 0.0, "backward": 0.0}
    ring = {"forward": 0.0, "backward": 0.0}
    last = 0.0
    for message in messages:
        sums = ring if message.collective == "ring" else seconds
        took = axis_seconds(message.axis, message.collective, message.size(n, plan.precision, profile), plan, cluster)
        sums[message.phase] += took
        last = took if message.phase == "forward" and sums is seconds else last
    hidden = 0.0
    for phase, sent in ring.items():
        behind = min(sent, cluster.overlap * _attention_seconds(layer, phase, n, pricer))
        seconds[phase] += sent - behind
        hidden += behind
    if plan.recompute == "full" and layer.composite:
        seconds["backward"] += seconds["forward"] - last  # sent again, except the last: no recomputed op needs it
    return LayerCommTime(seconds["forward"], seconds["backward"], hidden)


def _attention_seconds(layer: Layer, phase: str, n: float, pricer: Pricer) -> float:
    """Seconds of the attention that keys and values of a ring travel behind."""
    kinds = ("attention", "attention_backward")
    return sum(pricer.op_seconds(op, n) * op.count for op in layer.ops if op.kind in kinds and op.phase == phase)


def _with_statistics(comm: LayerCommTime, time: LayerTime, plan: Plan, cluster: Cluster) -> LayerCommTime:
    """Add the BatchNorm statistics: each norm waits for one small all-reduce whenever it runs, forward or backward.

    They span all ranks that have other samples, or other parts of them.
    """
    layer, ranks = time.layer, plan.dp * copies(plan)
    if not layer.batch_norms or ranks == 1:
        return comm
    runs = 3 if plan.recompute != "none" and layer.composite else 2
    wait = cluster.mid_step_message_s
    if cluster.device.kind == "cpu" and not plan.splits_model:
        wait = min(wait, MOST_DRIFT * (time.forward + time.backward) / (layer.batch_norms * runs))
    wait = max(wait, collective_seconds("all_reduce", ranks, STATISTICS_BYTES, cluster, stride=plan.tp))
    forward, backward = layer.batch_norms * wait, layer.batch_norms * (runs - 1) * wait
    return LayerCommTime(comm.forward + forward, comm.backward + backward, comm.hidden)
