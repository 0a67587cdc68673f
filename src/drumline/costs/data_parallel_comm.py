"""The collectives of data parallelism in a step: when each can start, its seconds alone, how much of it is hidden.

zero=0 all-reduces gradients over all replicas. zero=1 and 2 reduce-scatter them over the shards, and all-gather the
updated parameters after the optimizer. zero=3 gathers parameters before a layer runs, and scatters its gradients after.
Where there are more replicas than shards, each shard of the gradients is then summed over its replicas: under zero=3 in
every micro-batch, else once, after the last backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..clusters import Cluster
from ..models.profile import Layer, Profile
from ..plans import Plan
from ..plans.engine_constants import FIRST_BUCKET_BYTES, POWERSGD_RANK
from ..theory.roofline import MEMORY_EFFICIENCY, STORED_BYTES
from .collectives import holders, inner, replicas
from .gradient_algorithm import RankGroup, gradient_seconds
from .kernel_time import Pricer
from .layer_time import LayerTime
from .optimizer_update import copy_seconds


@dataclass(frozen=True, slots=True)
class CollectiveMessage:
    """One collective of a step, and its seconds without other traffic."""

    name: str
    collective: str
    bytes: float
    seconds: float


GatherReduce = tuple[CollectiveMessage | None, CollectiveMessage | None]
"""The gather before a layer runs (forward, and again backward), and the reduction after its backward."""


@dataclass(frozen=True, slots=True)
class LayerCollectives:
    """The collectives around the layers of one micro-batch, with their seconds by layer."""

    messages: list[GatherReduce]
    gather: list[float]
    reduce: list[float]

    @classmethod
    def of(cls, messages: list[GatherReduce]) -> LayerCollectives:
        """Look up the seconds, which are read often."""
        gather = [g.seconds if g else 0.0 for g, _ in messages]
        return cls(messages, gather, [r.seconds if r else 0.0 for _, r in messages])


def layer_collectives(profile: Profile, plan: Plan, cluster: Cluster) -> list[GatherReduce]:
    """The collectives around every layer, in the order in which layers run."""
    layers = list(profile.each())
    if plan.zero == 3:
        return _by_unit(layers, profile, plan, cluster)
    if plan.dp == 1 or (plan.splits_model and (plan.zero == 0 or plan.pp > 1)):
        return [(None, None)] * len(layers)
    return _by_bucket(layers, profile, plan, cluster)


def gradient_collectives(profile: Profile, plan: Plan, cluster: Cluster) -> list[CollectiveMessage]:
    """After the last backward, not hidden: zero=1 and 2 sum each shard over its replicas, bucket by bucket.

    A split model does so at zero=0 too, together with the ranks that have other parts of the samples. A pipeline has
    its gradients complete at its end, and scatters them then. Parameters whose gradients tensor-parallel ranks sum as
    well are in buckets of their own.
    """
    if plan.zero == 3 or not (plan.zero or plan.splits_model):
        return []
    messages = []
    common = sum(x.tp_replicated * x.repeats for x in profile.layers)
    for numbers, (ranks, stride) in ((profile.trained - common, replicas(plan)), (common, holders(plan))):
        count, size = _buckets(numbers * profile.parameter_bytes, plan)
        share = size / plan.shards
        if plan.pp > 1 and plan.shards > 1:
            seconds = _scatter_seconds(size, plan, cluster)
            messages += [CollectiveMessage("reduce-scatter bucket", "reduce_scatter", size, seconds)] * count
        if ranks > 1:
            seconds = gradient_seconds("all_reduce", RankGroup(ranks, stride), share, plan, cluster)
            messages += [CollectiveMessage("all-reduce bucket", "all_reduce", share, seconds)] * count
    return messages


def parameter_collectives(profile: Profile, plan: Plan, cluster: Cluster) -> list[CollectiveMessage]:
    """After the update, not hidden: zero=1 and 2 all-gather the updated shards of every bucket."""
    if plan.zero not in (1, 2) or plan.shards == 1:
        return []
    count, size = _buckets(profile.trained * profile.parameter_bytes, plan)
    return [CollectiveMessage("all-gather bucket", "all_gather", size, _gather_seconds(size, plan, cluster))] * count


def _buckets(size: float, plan: Plan) -> tuple[int, float]:
    """The number of buckets of flat shards of `size` bytes, and the bytes of one."""
    count = math.ceil(size / plan.bucket)
    return count, size / max(1, count)


def reduces_every_micro_batch(plan: Plan) -> bool:
    """Whether gradients are reduced in every micro-batch, not only in the last."""
    return plan.zero >= 2


def prefetches(plan: Plan, cluster: Cluster) -> tuple[bool, bool]:
    """Whether zero=3 gathers parameters one layer ahead, in the forward and in the backward.

    A GPU's host issues gathers ahead of time; a CPU gathers on demand, except in the backward. A single rank does so on
    demand too: there is nothing to gather, only to copy from its host.
    """
    return plan.shards > 1 and cluster.device.kind == "cuda", plan.shards > 1


def exposed_communication(
    times: Sequence[LayerTime], sent: LayerCollectives, plan: Plan, cluster: Cluster
) -> tuple[float, float]:
    """(exposed, hidden) seconds: collectives run behind the remaining compute, at `overlap` of their speed."""
    total = sum(sent.reduce)
    if not total:
        return 0.0, 0.0
    if plan.zero == 3:
        return _exposed_sharded(times, sent, plan, cluster)
    # the last bucket to fill, that of the first layers, has nothing left to hide behind
    full = [i for i, seconds in enumerate(sent.reduce) if seconds]
    window = sum(t.backward for t in times[: full[-1]])
    hidden = min(max(0.0, total - sent.reduce[full[0]]), cluster.overlap * window)
    repeats = plan.micro if reduces_every_micro_batch(plan) else 1
    return repeats * (total - hidden), repeats * hidden


def _exposed_sharded(
    times: Sequence[LayerTime], sent: LayerCollectives, plan: Plan, cluster: Cluster
) -> tuple[float, float]:
    """(exposed, hidden) of zero=3: parameters are gathered one layer ahead, behind that layer's compute.

    The group of the whole model, which comes with the first layer, stays gathered between forward and backward.
    """
    gather, reduce = sent.gather, sent.reduce
    forward, backward = prefetches(plan, cluster)
    behind = cluster.overlap if forward else 0.0
    last = len(times) - 1
    exposed = gather[0] + (gather[last] if last else 0.0) + reduce[0]
    exposed += sum(max(0.0, gather[i] - behind * times[i - 1].forward) for i in range(1, last + 1))
    for i in range(last, -1, -1):
        next_gather, this_gather = (gather[i - 1] if i > 1 else 0.0), (gather[i] if 0 < i < last else 0.0)
        in_flight = (next_gather if backward else 0.0) + (reduce[i + 1] if i < last else 0.0)
        busy = times[i].backward + (0.0 if backward else this_gather)
        exposed += max(0.0, in_flight - cluster.overlap * busy) + (0.0 if backward else this_gather)
    total = 2 * sum(gather) - gather[0] + sum(reduce)
    return plan.micro * min(exposed, total), plan.micro * max(0.0, total - exposed)


def sharded_units_seconds(sent: LayerCollectives, plan: Plan, cluster: Cluster) -> float:
    """zero=3: bookkeeping and copies of the sharded units in one micro-batch, beyond their messages."""
    if plan.zero < 3 or not any(sent.reduce):
        return 0.0
    return cluster.sharded_unit_s * sum(1 for gather, _ in sent.messages if gather)


def bucket_copy_seconds(profile: Profile, plan: Plan, cluster: Cluster, pricer: Pricer) -> float:
    """Copies of gradients into their buckets. They take a CPU's time; a GPU makes them while its matmuls run.

    They are not counted for a split model.
    """
    if plan.dp == 1 or plan.zero == 3 or plan.splits_model or cluster.device.kind == "cuda":
        return 0.0
    moved = 2.0 * profile.trained * profile.parameter_bytes
    repeats = plan.micro if reduces_every_micro_batch(plan) else 1
    rate = pricer.memory_rate("pointwise", max(1.0, moved))
    return repeats * cluster.compute_factor(plan.ranks) * moved / rate


def gathered_sizes(layer: Layer, profile: Profile, plan: Plan) -> tuple[int, float]:
    """(parameters gathered together, parameters of each of the `chunk` parts that are gathered one by one).

    chunk cuts the parameters that are at least half as large as the largest. A profile knows the largest of a layer
    alone: if other parameters of the layer are cut too, less is gathered together than this counts.
    """
    whole = layer.parameters + layer.frozen
    if plan.chunk == 1 or 2 * layer.largest < max(x.largest for x in profile.layers):
        return whole, 0.0
    return whole - layer.largest, layer.largest / plan.chunk


def _by_bucket(layers: list[Layer], profile: Profile, plan: Plan, cluster: Cluster) -> list[GatherReduce]:
    """Gradients fill buckets from the last layer to the first; a full bucket is sent."""
    word = "reduce-scatter" if plan.zero else "all-reduce"
    filled, tensors, number = 0.0, 0, 0
    limit = float(min(plan.bucket, FIRST_BUCKET_BYTES))
    result: list[GatherReduce] = []
    for i, layer in enumerate(reversed(layers)):
        filled += layer.parameters * profile.parameter_bytes
        tensors += layer.tensors
        message = None
        if filled and (filled >= limit or i == len(layers) - 1):
            # a layer larger than a bucket is sent in several, back to back
            pieces = max(1, round(filled / plan.bucket))
            sent, extra = _compressed(filled / pieces, tensors / pieces, profile, plan, cluster)
            seconds = pieces * (_bucket_seconds(sent, plan, cluster) + extra)
            name = f"{word} bucket {number}"
            message = CollectiveMessage(name, word.replace("-", "_"), pieces * sent, seconds)
            filled, tensors, limit, number = 0.0, 0, float(plan.bucket), number + 1
        result.append((None, message))
    return result[::-1]


def _by_unit(layers: list[Layer], profile: Profile, plan: Plan, cluster: Cluster) -> list[GatherReduce]:
    """Each unit is gathered before it runs and reduced after; parameters outside of units go with the first layer."""
    width = profile.parameter_bytes
    copy = min(width, STORED_BYTES[plan.precision])
    rest = sum(gathered_sizes(x, profile, plan)[0] for x in layers if not x.shard_unit)
    known: dict[tuple[int, float], tuple[float, float]] = {}

    def seconds(together: int, part: float) -> tuple[float, float]:
        """Of gathering and of reducing, one collective for what goes together and one for each part."""
        if (together, part) not in known:
            sizes = [(together, 1), (part, plan.chunk if part else 0)]
            gather = sum(k * _gather_seconds(n * copy, plan, cluster) for n, k in sizes)
            reduce = sum(k * _scatter_seconds(n * width, plan, cluster) for n, k in sizes)
            reduce += sum(k * _replica_seconds(n * width / plan.shards, plan, cluster) for n, k in sizes)
            if plan.offload == "all":
                moved = copy_seconds((together + part * plan.chunk) * width / plan.shards, cluster.device)
                gather, reduce = gather + moved, reduce + moved
            known[together, part] = gather, reduce
        return known[together, part]

    result: list[GatherReduce] = []
    for i, layer in enumerate(layers):
        together, part = gathered_sizes(layer, profile, plan)
        together = (together if layer.shard_unit else 0) + (rest if i == 0 else 0)
        numbers = together + part * plan.chunk
        if not numbers:
            result.append((None, None))
            continue
        gather, reduce = seconds(together, part)
        name = layer.name or "model"
        result.append(
            (
                CollectiveMessage(f"all-gather {name}", "all_gather", numbers * copy, gather),
                CollectiveMessage(f"reduce-scatter {name}", "reduce_scatter", numbers * width, reduce),
            )
        )
    return result


def _gather_seconds(size: float, plan: Plan, cluster: Cluster) -> float:
    return gradient_seconds("all_gather", RankGroup(plan.shards, inner(plan)), size, plan, cluster)


def _scatter_seconds(size: float, plan: Plan, cluster: Cluster) -> float:
    return gradient_seconds("reduce_scatter", RankGroup(plan.shards, inner(plan)), size, plan, cluster)


def _replica_seconds(share: float, plan: Plan, cluster: Cluster) -> float:
    """A shard of the gradients, summed over its replicas."""
    return gradient_seconds("all_reduce", RankGroup(*replicas(plan)), share, plan, cluster)


def _bucket_seconds(size: float, plan: Plan, cluster: Cluster) -> float:
    return _scatter_seconds(size, plan, cluster) if plan.zero else _replica_seconds(size, plan, cluster)


def _compressed(size: float, tensors: float, profile: Profile, plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """(bytes sent for `size` bytes of gradients, seconds to compress and to decompress them)."""
    once = size / (MEMORY_EFFICIENCY * cluster.device.bandwidth)
    if plan.compress == "fp16" and profile.parameter_bytes > 2:
        sent = size * 2 / profile.parameter_bytes
        return sent, 2 * (once + sent / (MEMORY_EFFICIENCY * cluster.device.bandwidth))
    if plan.compress == "powersgd":
        numbers = size / profile.parameter_bytes
        # a square matrix of n numbers becomes two of sqrt(n) x rank; the gradient is read or written six times
        sent = 2 * POWERSGD_RANK * math.sqrt(numbers * max(1.0, tensors)) * profile.parameter_bytes
        return min(size, sent), 6 * once
    return size, 0.0
