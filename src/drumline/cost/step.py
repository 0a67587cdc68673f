"""The closed form of one step: compute, the communication that is not hidden, the optimizer; and its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..cluster import Cluster
from ..model.profile import Layer, Profile
from ..plan import Plan
from .collectives import collective_seconds
from .estimate import Estimate
from .memory import peak_memory
from .work import WIDTH, Pricer

FIRST_BUCKET = 2**20
"""The first bucket that DDP sends is small, so that sending begins early."""

UNMEASURED_ERROR = 0.5
MEASURED_ERROR = 0.25
"""Stated bounds on the relative error of a step's time, by where the rates come from."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of a step: when it can start, and how long it takes alone."""

    name: str
    collective: str
    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer's part of one micro-batch, and the messages around it."""

    layer: Layer
    forward: float
    backward: float
    """With recomputation, when there is any."""
    again: float
    """The recomputation in it."""
    gather: Message | None = None
    """Before its forward, and again before its backward."""
    reduce: Message | None = None
    """After its backward."""


def largest_share(batch_size: int, plan: Plan) -> int:
    """Samples of the largest micro-batch on the busiest rank."""
    return math.ceil(math.ceil(batch_size / plan.micro) / plan.dp)


def layer_times(profile: Profile, plan: Plan, cluster: Cluster, pricer: Pricer | None = None) -> list[LayerTime]:
    """The layers in the order in which they run, priced for this plan. Buckets hang on the layer that fills them."""
    pricer = pricer or Pricer(profile, cluster.device, plan.precision)
    n = largest_share(profile.batch_size, plan)
    times: list[LayerTime] = []
    wait = cluster.straggle if plan.dp > 1 else 1.0
    for layer in profile.each():
        forward = wait * pricer.layer_seconds(layer, "forward", n)
        again = forward if plan.recompute == "full" and layer.composite else 0.0
        backward = wait * pricer.layer_seconds(layer, "backward", n) + again
        times.append(LayerTime(layer, forward, backward, again))
    if plan.dp == 1:
        return times
    attach = _with_shards if plan.zero == 3 else _with_buckets
    return attach(times, profile, plan, cluster)


def _with_buckets(times: list[LayerTime], profile: Profile, plan: Plan, cluster: Cluster) -> list[LayerTime]:
    """Gradients fill buckets from the last layer to the first; a full bucket is sent."""
    filled, limit, number = 0.0, float(FIRST_BUCKET), 0
    result: list[LayerTime] = []
    for i, t in enumerate(reversed(times)):
        filled += t.layer.parameters * profile.parameter_bytes
        message = None
        if filled and (filled >= limit or i == len(times) - 1):
            # a layer larger than a bucket is sent in several, back to back
            pieces = max(1, round(filled / plan.bucket))
            seconds = pieces * collective_seconds("all_reduce", plan.dp, filled / pieces, cluster)
            message = Message(f"all-reduce bucket {number}", "all_reduce", filled, seconds)
            filled, limit, number = 0.0, float(plan.bucket), number + 1
        result.append(LayerTime(t.layer, t.forward, t.backward, t.again, None, message))
    return result[::-1]


def _with_shards(times: list[LayerTime], profile: Profile, plan: Plan, cluster: Cluster) -> list[LayerTime]:
    """Each unit is gathered before it runs and reduced after; what no unit holds goes with the first layer."""
    rest = sum((t.layer.parameters + t.layer.frozen) for t in times if not t.layer.unit)
    copy = min(profile.parameter_bytes, WIDTH[plan.precision])
    result = []
    for i, t in enumerate(times):
        numbers = (t.layer.parameters + t.layer.frozen if t.layer.unit else 0) + (rest if i == 0 else 0)
        gather = reduce = None
        if numbers:
            name = t.layer.name or "model"
            gather = _message("all_gather", f"all-gather {name}", numbers * copy, plan, cluster)
            reduce = _message(
                "reduce_scatter", f"reduce-scatter {name}", numbers * profile.parameter_bytes, plan, cluster
            )
        result.append(LayerTime(t.layer, t.forward, t.backward, t.again, gather, reduce))
    return result


def _message(collective: str, name: str, size: float, plan: Plan, cluster: Cluster) -> Message:
    return Message(name, collective, size, collective_seconds(collective, plan.shards, size, cluster))


def estimate(profile: Profile, plan: Plan, cluster: Cluster, *, pricer: Pricer | None = None) -> Estimate:
    """Time and memory of one step under a plan."""
    pricer = pricer or Pricer(profile, cluster.device, plan.precision)
    times = layer_times(profile, plan, cluster, pricer)
    m = plan.micro
    forward = m * sum(t.forward for t in times)
    again = m * sum(t.again for t in times)
    backward = m * sum(t.backward for t in times) - again
    exposed, hidden = _communication(times, plan, cluster)
    exposed += m * sum(statistics_seconds(t.layer, plan, cluster) for t in times)
    memory = peak_memory(profile, plan, largest_share(profile.batch_size, plan))
    # the engine agrees on the loss: one small all-reduce
    overhead = collective_seconds("all_reduce", plan.dp, 16, cluster)
    parts = {
        "forward": forward,
        "backward": backward,
        "recompute": again,
        "communication": exposed,
        "optimizer": _optimizer(profile, plan, pricer),
        "overhead": overhead,
    }
    measured = cluster.measured
    return Estimate(
        plan=str(plan),
        step_seconds=sum(parts.values()),
        parts=parts,
        memory_bytes=memory.total,
        memory_parts={
            "parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer,
            "activations": memory.activations, "communication": memory.communication,
        },
        memory_limit=max(0.0, cluster.device.memory - cluster.device.context),
        hidden_seconds=hidden,
        error=max(MEASURED_ERROR, cluster.spread) if measured else UNMEASURED_ERROR,
        origin=f"closed form; rates: {cluster.origin_of('device.peak')}; model: {profile.origin}",
    )  # fmt: skip


def statistics_seconds(layer: Layer, plan: Plan, cluster: Cluster) -> float:
    """Small messages that BatchNorms wait for: one in the forward and one in the backward of each."""
    if not layer.norms or plan.dp == 1:
        return 0.0
    times = 3 if plan.recompute == "full" and layer.composite else 2
    return layer.norms * times * max(cluster.stall, collective_seconds("all_reduce", plan.dp, 4096.0, cluster))


def _communication(times: list[LayerTime], plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """(exposed, hidden) seconds: messages run behind compute that remains, at the share `overlap` of their speed."""
    reduces = [t.reduce for t in times if t.reduce]
    if not reduces:
        return 0.0, 0.0
    if plan.zero == 3:
        return _sharded_communication(times, plan, cluster)
    total = sum(r.seconds for r in reduces)
    # the last bucket to fill, that of the first layers, has nothing left to hide behind
    first = max(i for i, t in enumerate(times) if t.reduce)
    window = sum(t.backward for t in times[:first])
    hidden = min(max(0.0, total - reduces[0].seconds), cluster.overlap * window)
    return total - hidden, hidden


def _sharded_communication(times: list[LayerTime], plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """(exposed, hidden): a layer's parameters are asked for one layer ahead, so that layer's compute hides them.

    A GPU is told what to do ahead of time; a CPU asks for parameters when it needs them, except in the backward. The
    group of the whole model, which comes with the first layer, stays gathered between forward and backward.
    """
    gather = [t.gather.seconds if t.gather else 0.0 for t in times]
    reduce = [t.reduce.seconds if t.reduce else 0.0 for t in times]
    ahead = cluster.overlap if cluster.device.kind == "cuda" else 0.0
    last = len(times) - 1
    exposed = gather[0] + (gather[last] if last else 0.0) + reduce[0]
    exposed += sum(max(0.0, gather[i] - ahead * times[i - 1].forward) for i in range(1, last + 1))
    for i in range(last, -1, -1):
        on_the_way = (gather[i - 1] if i > 1 else 0.0) + (reduce[i + 1] if i < last else 0.0)
        exposed += max(0.0, on_the_way - cluster.overlap * times[i].backward)
    total = 2 * sum(gather) - gather[0] + sum(reduce)
    units = sum(1 for t in times if t.gather)
    return plan.micro * (min(exposed, total) + units * cluster.unit), plan.micro * max(0.0, total - exposed)


def _optimizer(profile: Profile, plan: Plan, pricer: Pricer) -> float:
    """The update, and the global norm of the gradients that is taken before it."""
    share = 1.0 / plan.shards
    norm = profile.parameter_bytes
    return sum(
        pricer.update_seconds(x, profile.optimizer_bytes, profile.optimizer_ops, share)
        + pricer.update_seconds(x, norm, 1.0, share)
        for x in profile.each()
    )
