"""Bytes that a step sends over each level of links, and the share of the step in which these are busy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..models.profile import Profile
from ..plans import Plan
from ..theory.alpha_beta import level
from .collectives import TWO_LEVELS, axis_group, inner, node_levels, replicas
from .data_parallel_comm import CollectiveMessage
from .layer_time import largest_micro_batch
from .operator_model import OperatorCostModel
from .optimizer_update import effective_plan
from .stages import layer_shares
from .step import Step


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """One level of links in a step, of the rank or node that sends the most."""

    level: str
    """`node`: the link of a device inside its node; `network`: that of a node, which its devices share."""
    bytes: float
    """Sent in one direction per step."""
    bandwidth: float
    busy: float
    """Share of the step for which these bytes occupy the link at its full bandwidth."""


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """Messages of one kind between the ranks of a group."""

    collective: str
    """`send` is a message to the next rank."""
    ranks: int
    stride: int
    bytes: float
    """Of the buffer, over all repetitions in a step."""


def link_use(
    model: OperatorCostModel, profile: Profile, plan: Plan, cluster: Cluster, step_seconds: float
) -> tuple[LinkLoad, ...]:
    """The use of the links inside nodes and between them; empty if nothing is sent."""
    plan = effective_plan(plan, cluster)
    step = model.step(plan)
    n = largest_micro_batch(profile.batch_size, plan)
    totals: dict[str, float] = {"node": 0.0, "network": 0.0}
    for stage in range(plan.pp):
        sums = {"node": 0.0, "network": 0.0}
        for traffic in _of_stage(model, profile, plan, step, n, stage):
            for name, size in bytes_by_level(traffic, cluster):
                sums[name] += size
        totals = {name: max(size, sums[name]) for name, size in totals.items()}
    rates = {"node": cluster.node.link.bandwidth}
    if cluster.network is not None:
        rates["network"] = cluster.network.link.bandwidth
    return tuple(
        LinkLoad(name, totals[name], rate, totals[name] / rate / step_seconds if step_seconds else 0.0)
        for name, rate in rates.items()
        if totals[name]
    )


def _of_stage(
    model: OperatorCostModel, profile: Profile, plan: Plan, step: Step, n: int, stage: int
) -> Iterator[GroupTraffic]:
    """Bytes that the ranks of a stage send: in their layers, to other stages, between replicas."""
    rank = model.rank_model(plan)
    shares: Sequence[tuple[int, float]]
    if step.pipeline is None:
        shares = [(i, float(x.repeats)) for i, x in enumerate(rank.profile.layers)]
    else:
        shares = layer_shares(step.pipeline.of_rank(stage))
        yield from _between_stages(plan, step, stage)
    for i, share in shares:
        for traffic in (x for phase in layer_traffic(model, profile, plan, n, i) for x in phase):
            yield replace(traffic, bytes=share * plan.micro * traffic.bytes)
    for i, (gather, reduce) in enumerate(step.collectives.messages):
        # forward and backward; the group of the whole model, which comes with the first layer, stays gathered
        yield from replica_traffic(gather, plan, plan.micro * (2 if i else 1))
        yield from replica_traffic(reduce, plan, plan.micro if step.reduces_every_micro_batch else 1)
    for part in step.tails[stage]:
        for message in part.messages:
            yield from replica_traffic(message, plan, 1)


def layer_traffic(
    model: OperatorCostModel, profile: Profile, plan: Plan, n: int, layer: int
) -> tuple[list[GroupTraffic], list[GroupTraffic]]:
    """Messages of a layer in the forward and in the backward of n samples; the backward sends again to recompute."""
    rank = model.rank_model(plan)
    again = plan.recompute == "full" and rank.profile.layers[layer].composite
    both: tuple[list[GroupTraffic], list[GroupTraffic]] = ([], [])
    for m in rank.messages[layer]:
        # an all-to-all sends as many bytes as a reduce-scatter of the same buffer
        kind = {"ring": "send", "all_to_all": "reduce_scatter"}.get(m.collective, m.collective)
        traffic = GroupTraffic(kind, *axis_group(m.axis, plan), m.size(n, plan.precision, profile))
        both[m.phase == "backward"].append(traffic)
    if again:
        waited = [
            k for k, m in enumerate(x for x in rank.messages[layer] if x.phase == "forward") if m.collective != "ring"
        ]
        both[1].extend(both[0][k] for k in waited[:-1])  # the last is not needed again
    return both


def _between_stages(plan: Plan, step: Step, stage: int) -> Iterator[GroupTraffic]:
    cost = step.pipeline
    assert cost is not None
    last = len(cost.stages) - 1
    for i, home in cost.homes.items():
        forward = home == stage and i < last and cost.homes[i + 1] != stage
        backward = home == stage and i > 0 and cost.homes[i - 1] != stage
        size = (cost.stages[i][-1].output if forward else 0.0) + (cost.stages[i - 1][-1].output if backward else 0.0)
        yield GroupTraffic("send", plan.pp, plan.ranks // plan.pp, plan.micro * size)


def replica_traffic(message: CollectiveMessage | None, plan: Plan, times: int) -> Iterator[GroupTraffic]:
    """GroupTraffic of a data-parallel collective that happens so many times."""
    if message is None:
        return
    whole = message.collective == "all_reduce"
    ranks, stride = replicas(plan) if whole else (plan.shards, inner(plan))
    yield GroupTraffic(message.collective, ranks, stride, times * message.bytes)
    if plan.zero == 3 and not whole and message.collective == "reduce_scatter" and plan.dp > plan.shards:
        yield GroupTraffic("all_reduce", *replicas(plan), times * message.bytes / plan.shards)


def bytes_by_level(t: GroupTraffic, cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Bytes on the link of a device inside its node, and on that of a node: all groups on a node share the latter."""
    if t.ranks == 1 or not t.bytes:
        return
    if level((t.ranks - 1) * t.stride + 1, cluster) is not None:
        yield "node", _sent(t.collective, t.ranks, t.bytes)
        return
    together = min(t.stride, cluster.node.devices)
    if t.collective == "send":
        yield "network", together * t.bytes
        return
    here = node_levels(cluster, t.ranks, t.stride).devices
    for phase, where in TWO_LEVELS[t.collective]:
        if where == "inside":
            yield "node", _sent(phase, here, t.bytes)
        else:
            yield "network", together * _sent(phase, -(-t.ranks // here), t.bytes)


def _sent(collective: str, p: int, m: float) -> float:
    """Bytes that a rank of a ring sends of a buffer of m bytes."""
    return {"all_reduce": 2 * (p - 1) / p, "broadcast": 1.0, "send": 1.0}.get(collective, (p - 1) / p) * m
