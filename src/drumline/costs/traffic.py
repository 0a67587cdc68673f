"""The messages of a step: which collectives a plan sends around each layer, and how long each takes alone.

zero=0 sums gradients over all replicas. zero=1 and 2 scatter the sums over the shards, and gather the updated
parameters after the optimizer. zero=3 gathers parameters before a layer runs, and scatters its gradients after. Where
there are more replicas than shards, each share of the gradients is then summed over the replicas that hold it: under
zero=3 in every micro-batch, else once, after the last backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..clusters import Cluster
from ..models.profile import Layer, Profile
from ..plans import Plan
from ..theory.roofline import BYTES_PER_VALUE, MEMORY_EFFICIENCY
from .axes import holders, inner, replicas
from .collectives import collective_seconds
from .host import copy_seconds

FIRST_BUCKET = 2**20
"""The bucket that is filled first is small, so that sending begins early."""

POWER_RANK = 4
"""Columns of the factors that compress=powersgd sends."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of a step: when it can start, and how long it takes alone."""

    name: str
    collective: str
    bytes: float
    seconds: float


Around = tuple[Message | None, Message | None]
"""What is gathered before a layer runs (forward, and again backward), and what is sent after its backward."""


def messages(profile: Profile, plan: Plan, cluster: Cluster) -> list[Around]:
    """The messages of every layer, in the order in which layers run."""
    layers = list(profile.each())
    if plan.zero == 3:
        return _by_unit(layers, profile, plan, cluster)
    if plan.dp == 1 or (plan.splits_model and (plan.zero == 0 or plan.pp > 1)):
        return [(None, None)] * len(layers)
    return _by_bucket(layers, profile, plan, cluster)


def after_backward(profile: Profile, plan: Plan, cluster: Cluster) -> list[Message]:
    """zero=1 and 2: the replicas of each shard sum their shares, bucket by bucket. Nothing hides this.

    A split model does so at zero=0 too, and ranks with other parts of the samples take part. A pipeline has all its
    gradients at its end, and scatters them then. Where tensor-parallel ranks have summands too, these are in buckets of
    their own.
    """
    if plan.zero == 3 or not (plan.zero or plan.splits_model):
        return []
    found = []
    common = sum(x.common * x.repeats for x in profile.layers)
    for numbers, (ranks, stride) in ((profile.trained - common, replicas(plan)), (common, holders(plan))):
        count, size = _buckets(numbers * profile.parameter_bytes, plan)
        share = size / plan.shards
        if plan.pp > 1 and plan.shards > 1:
            seconds = _scatter_seconds(size, plan, cluster)
            found += [Message("reduce-scatter bucket", "reduce_scatter", size, seconds)] * count
        if ranks > 1:
            seconds = collective_seconds("all_reduce", ranks, share, cluster, stride=stride)
            found += [Message("all-reduce bucket", "all_reduce", share, seconds)] * count
    return found


def after_update(profile: Profile, plan: Plan, cluster: Cluster) -> list[Message]:
    """zero=1 and 2: each rank has updated its shard of every bucket; the others need it. Nothing hides this."""
    if plan.zero not in (1, 2) or plan.shards == 1:
        return []
    count, size = _buckets(profile.trained * profile.parameter_bytes, plan)
    return [Message("all-gather bucket", "all_gather", size, _gather_seconds(size, plan, cluster))] * count


def _buckets(size: float, plan: Plan) -> tuple[int, float]:
    """How many buckets flat shards of so many bytes have, and the bytes of one."""
    count = math.ceil(size / plan.bucket)
    return count, size / max(1, count)


def reduced_often(plan: Plan) -> bool:
    """Whether gradients travel in every micro-batch, and not only in the last."""
    return plan.zero >= 2


def cut(layer: Layer, profile: Profile, plan: Plan) -> tuple[int, float]:
    """(numbers that are gathered together, numbers of each of the `chunk` parts that are gathered one by one).

    chunk cuts the parameters that are at least half as large as the largest. A profile knows the largest of a layer
    alone: if others of the layer are cut too, less is gathered together than this says.
    """
    whole = layer.parameters + layer.frozen
    if plan.chunk == 1 or 2 * layer.largest < max(x.largest for x in profile.layers):
        return whole, 0.0
    return whole - layer.largest, layer.largest / plan.chunk


def _by_bucket(layers: list[Layer], profile: Profile, plan: Plan, cluster: Cluster) -> list[Around]:
    """Gradients fill buckets from the last layer to the first; a full bucket is sent."""
    word = "reduce-scatter" if plan.zero else "all-reduce"
    filled, tensors, number = 0.0, 0, 0
    limit = float(min(plan.bucket, FIRST_BUCKET))
    result: list[Around] = []
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
            message = Message(name, word.replace("-", "_"), pieces * sent, seconds)
            filled, tensors, limit, number = 0.0, 0, float(plan.bucket), number + 1
        result.append((None, message))
    return result[::-1]


def _by_unit(layers: list[Layer], profile: Profile, plan: Plan, cluster: Cluster) -> list[Around]:
    """Each unit is gathered before it runs and reduced after; what no unit holds goes with the first layer."""
    width = profile.parameter_bytes
    copy = min(width, BYTES_PER_VALUE[plan.precision])
    rest = sum(cut(x, profile, plan)[0] for x in layers if not x.unit)
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

    result: list[Around] = []
    for i, layer in enumerate(layers):
        together, part = cut(layer, profile, plan)
        together = (together if layer.unit else 0) + (rest if i == 0 else 0)
        numbers = together + part * plan.chunk
        if not numbers:
            result.append((None, None))
            continue
        gather, reduce = seconds(together, part)
        name = layer.name or "model"
        result.append(
            (
                Message(f"all-gather {name}", "all_gather", numbers * copy, gather),
                Message(f"reduce-scatter {name}", "reduce_scatter", numbers * width, reduce),
            )
        )
    return result


def _gather_seconds(size: float, plan: Plan, cluster: Cluster) -> float:
    return collective_seconds("all_gather", plan.shards, size, cluster, stride=inner(plan)) if size else 0.0


def _scatter_seconds(size: float, plan: Plan, cluster: Cluster) -> float:
    return collective_seconds("reduce_scatter", plan.shards, size, cluster, stride=inner(plan)) if size else 0.0


def _replica_seconds(share: float, plan: Plan, cluster: Cluster) -> float:
    """A share of the gradients, summed over the replicas that hold it: they stand a whole copy apart."""
    ranks, stride = replicas(plan)
    return collective_seconds("all_reduce", ranks, share, cluster, stride=stride)


def _bucket_seconds(size: float, plan: Plan, cluster: Cluster) -> float:
    return _scatter_seconds(size, plan, cluster) if plan.zero else _replica_seconds(size, plan, cluster)


def _compressed(size: float, tensors: float, profile: Profile, plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """(bytes that are sent of m bytes of gradients, seconds that it takes to make and to undo them)."""
    stream = size / (MEMORY_EFFICIENCY * cluster.device.bandwidth)
    if plan.compress == "fp16" and profile.parameter_bytes > 2:
        sent = size * 2 / profile.parameter_bytes
        return sent, 2 * (stream + sent / (MEMORY_EFFICIENCY * cluster.device.bandwidth))
    if plan.compress == "powersgd":
        numbers = size / profile.parameter_bytes
        # a square matrix of n numbers becomes two of sqrt(n) x rank; the gradient is read or written six times
        sent = 2 * POWER_RANK * math.sqrt(numbers * max(1.0, tensors)) * profile.parameter_bytes
        return min(size, sent), 6 * stream
    return size, 0.0
