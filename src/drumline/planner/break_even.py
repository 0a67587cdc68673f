"""Break-even points: what would have to change for another family of plans to become the fastest.

Links and batch size are varied step by step and the best meshes priced again; where another family comes first, the
threshold is bisected. Memory needs no trial: the plans that are priced already show which one wins at which size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..clusters import Cluster, CollectiveTable, Link
from ..core.units import format_bytes, format_rate
from ..costs import Estimate, cost_model
from ..costs.model import CostModel
from ..models.profile import Profile
from ..plans import Plan
from .memory_saving import most_savings
from .objectives import Scored, simplest_first, tie_width
from .plan_families import families_of
from .space import MAX_ACTIONS

FACTORS = (4.0, 16.0, 64.0)
"""Factors by which a quantity is raised and lowered until another family wins."""
PER_FAMILY = 5
"""Meshes of every combination of families that are priced again, each with its best number of micro-batches."""
MEMORY_FACTOR = 8.0
"""Device memory is varied by up to this factor, up and down."""
MIN_RANGE = 1.05
"""Narrower ranges of memory, as largest over smallest, are not mentioned."""
TOLERANCE = 1.03
"""Precision of a threshold, as a factor."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """The value from which on a plan of another family is the fastest."""

    family: str
    plan: str
    key: str
    """`node.link.bandwidth`, `network.link.bandwidth`, `messages` (time relative to measured), `device.memory` or
    `batch`."""
    value: float
    below: bool
    """Whether it wins below the value, or above it."""
    until: float = 0.0
    """For memory: the other end of the range; 0 where it is open."""

    def __str__(self) -> str:
        if self.key == "messages":
            return f"if messages take {self.value:.2g} times as long as measured"
        if self.key == "batch":
            more = "or fewer" if self.below else "or more"
            return f"with batches of {self.value:.0f} samples {more}" if self.value > 1 else "with one sample per step"
        if self.key == "device.memory":
            ends = sorted(x for x in (self.value, self.until) if x)
            return f"with {' to '.join(map(format_bytes, ends))}{' or more' if len(ends) == 1 else ''} per device"
        where = "between nodes" if self.key.startswith("network") else "inside a node"
        return f"if the link {where} is {'slower' if self.below else 'faster'} than {format_rate(self.value)}"


@dataclass(frozen=True, slots=True)
class _Variation:
    """A question with one quantity changed."""

    batch_size: int
    model: CostModel
    adapt: Callable[[Plan], Plan | None]
    """A plan as it would be then; None where it cannot be."""


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A plan, and what becomes of it after a change."""

    now: Plan
    then: Plan


Vary = Callable[[float], _Variation]


def thresholds(profile: Profile, cluster: Cluster, ranked: list[Scored]) -> list[Threshold]:
    """For every family that some change makes the fastest, the nearest such change of each quantity."""
    winner = ranked[0][0]
    plans = _best_meshes(ranked)
    model = cost_model(profile, cluster, winner.precision)
    result = _memory_thresholds(cluster, [*ranked, *_smaller_plans(ranked, cluster, model)])
    for key, now, vary in _quantities(profile, cluster, model, plans):
        nearest: dict[str, tuple[float, str]] = {}
        for name, factor, plan in _changes_of_winner(winner, plans, vary):
            if name not in nearest or abs(math.log(factor)) < abs(math.log(nearest[name][0])):
                nearest[name] = factor, plan
        for name, (factor, plan) in nearest.items():
            value = float(round(now * factor)) if key == "batch" else now * factor
            result.append(Threshold(name, plan, key, value, factor < 1))
    return result


def link_thresholds(profile: Profile, cluster: Cluster, winner: Plan, rival: Plan) -> list[Threshold]:
    """Link speeds at which `rival` becomes faster than `winner`; both fit, and no other plan is considered."""
    result = []
    both = [winner, rival]
    for key, now, vary in _quantities(profile, cluster, cost_model(profile, cluster, winner.precision), both):
        if key == "batch":
            continue
        for factor in sorted((f for k in FACTORS for f in (k, 1 / k)), key=lambda f: abs(math.log(f))):
            if _fastest(both, vary, factor) == rival:
                threshold = _bisect_pair(both, vary, factor)
                result.append(Threshold("", str(rival), key, now * threshold, threshold < 1))
                break
    return result


def _bisect_pair(both: list[Plan], vary: Vary, after: float) -> float:
    """The factor from which on the second of two plans is faster."""
    before = 1.0
    while max(before, after) / min(before, after) > TOLERANCE:
        middle = math.sqrt(before * after)
        before, after = (before, middle) if _fastest(both, vary, middle) == both[1] else (middle, after)
    return after


def _best_meshes(ranked: list[Scored]) -> list[Plan]:
    """The best plan of every mesh that fits, fastest first; PER_FAMILY of each combination of families."""
    best: dict[tuple[object, ...], Plan] = {}
    count: Counter[tuple[str, ...]] = Counter()
    for plan, e in ranked:
        mesh = (plan.dp, plan.tp, plan.pp, plan.cp, plan.tile, plan.zero, plan.shard, plan.offload)
        usable = e.fits and e.in_reserve == ranked[0][1].in_reserve
        if usable and mesh not in best and count[families_of(plan)] < PER_FAMILY:
            best[mesh] = plan
            count[families_of(plan)] += 1
    return list(best.values())


def _quantities(
    profile: Profile, cluster: Cluster, model: CostModel, plans: list[Plan]
) -> Iterator[tuple[str, float, Vary]]:
    """Quantities that are varied: (key, current value, variation)."""

    def vary_link(change: Callable[[Cluster, float], Cluster]) -> Vary:
        return lambda f: _Variation(profile.batch_size, model.on_links_of(change(cluster, f)), lambda plan: plan)

    def vary_batch(f: float) -> _Variation:
        samples = max(1, round(profile.batch_size * f))
        # a pipeline with too many actions to play cannot be compared
        too_long = f > 1 and any(plan.pp > 1 and plan.pp * plan.micro * f > MAX_ACTIONS for plan in plans)
        adapt = (lambda plan: None) if too_long else (lambda plan: _rebatched(plan, profile.batch_size, f))
        return _Variation(samples, model.with_batch_size(samples), adapt)

    if cluster.devices > 1 and cluster.collective:
        yield "messages", 1.0, vary_link(with_slower_messages)
    elif cluster.devices > 1:
        yield "node.link.bandwidth", cluster.node.link.bandwidth, vary_link(_with_node_bandwidth)
        if cluster.network is not None:
            yield "network.link.bandwidth", cluster.network.link.bandwidth, vary_link(_with_network_bandwidth)
    yield "batch", float(profile.batch_size), vary_batch


def _changes_of_winner(winner: Plan, plans: list[Plan], vary: Vary) -> Iterator[tuple[str, float, str]]:
    """(family, factor, plan) for each family that comes first on the way down, or on the way up."""
    for down in (True, False):
        seen = set(families_of(winner))
        before = 1.0
        for step in FACTORS:
            factor = 1 / step if down else step
            order = _fastest_first(plans, vary, factor)
            if not order:
                break
            new = [name for name in families_of(order[0].then) if name not in seen]
            for name in new:
                near = [p.now for p in (*order[:8], *_fastest_first(plans, vary, before)[:8])]
                yield name, *_bisect_family(name, list(dict.fromkeys(near)), vary, before, factor)
            seen.update(new)
            before = factor


def _bisect_family(name: str, plans: list[Plan], vary: Vary, before: float, after: float) -> tuple[float, str]:
    """The factor from which on a plan of the family is the fastest, and that plan."""
    first = str(_fastest_first(plans, vary, after)[0].then)
    while max(before, after) / min(before, after) > TOLERANCE:
        middle = math.sqrt(before * after)
        order = _fastest_first(plans, vary, middle)
        if order and name in families_of(order[0].then):
            after, first = middle, str(order[0].then)
        else:
            before = middle
    return after, first


def _fastest_first(plans: list[Plan], vary: Vary, factor: float) -> list[_Adapted]:
    """The plans that fit after a change, fastest first, but the simplest of those that tie before them."""
    varied = vary(factor)
    adapted = [_Adapted(plan, then) for plan in plans if (then := varied.adapt(plan)) is not None]
    fitting = [p for p in adapted if p.then.dp * p.then.micro <= varied.batch_size and varied.model.fits(p.then)]
    seconds = varied.model.seconds([p.then for p in fitting])
    fastest = sorted(range(len(fitting)), key=lambda i: seconds[i])
    order = simplest_first([(fitting[i].then, seconds[i]) for i in fastest], width=tie_width(varied.model.error))
    return [fitting[fastest[k]] for k in order]


def _fastest(plans: list[Plan], vary: Vary, factor: float) -> Plan | None:
    """The plan that is the fastest after a change of links, which leaves plans as they are; None if none fits."""
    return next((p.then for p in _fastest_first(plans, vary, factor)), None)


def with_slower_messages(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with all messages, measured ones too, slower by a factor."""
    network = cluster.network
    return replace(
        cluster,
        mid_step_message_s=cluster.mid_step_message_s * factor,
        node=replace(cluster.node, link=_slower_link(cluster.node.link, factor)),
        network=replace(network, link=_slower_link(network.link, factor)) if network else None,
        collective=_slower_tables(cluster.collective, factor),
        partial_occupancy={
            k: replace(
                f, mid_step_message_s=f.mid_step_message_s * factor, collective=_slower_tables(f.collective, factor)
            )
            for k, f in cluster.partial_occupancy.items()
        },
    )


def _slower_tables(tables: tuple[CollectiveTable, ...], factor: float) -> tuple[CollectiveTable, ...]:
    return tuple(replace(t, seconds=tuple(s * factor for s in t.seconds)) for t in tables)


def _slower_link(link: Link, factor: float) -> Link:
    return replace(link, alpha=link.alpha * factor, bandwidth=link.bandwidth / factor)


def _with_node_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    link = replace(cluster.node.link, bandwidth=cluster.node.link.bandwidth * factor)
    return replace(cluster, node=replace(cluster.node, link=link))


def _with_network_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    assert cluster.network is not None
    link = replace(cluster.network.link, bandwidth=cluster.network.link.bandwidth * factor)
    return replace(cluster, network=replace(cluster.network, link=link))


def _rebatched(plan: Plan, batch: int, factor: float) -> Plan | None:
    """The plan for another batch size: micro-batches scale with it; replicas never exceed the samples."""
    samples = max(1, round(batch * factor))
    dp = min(plan.dp, samples)
    micro = min(max(1, round(plan.micro * factor)), samples // dp)
    if plan.pp > 1 and plan.schedule == "interleaved":
        micro -= micro % plan.pp
    if not micro or dp % plan.ep:
        return None
    other = replace(plan, dp=dp, shard=plan.shard if dp == plan.dp else 0, micro=micro)
    return other if dp > 1 or plan.offload != "none" else replace(other, zero=0, chunk=1)


def _smaller_plans(ranked: list[Scored], cluster: Cluster, model: CostModel) -> list[Scored]:
    """Plans that only less memory makes interesting: those on the most devices, with offload or chunks."""
    most = max(plan.ranks for plan, _ in ranked)
    whole = [p for p, _ in ranked if p.ranks == most and not p.splits_model and p.offload == "none" and p.chunk == 1]
    priced = {plan for plan, _ in ranked}
    smallest = [p for p in whole if p.zero == 3 or p.dp == 1]
    plans = [p for plan in smallest for p in most_savings(plan, cluster) if p not in priced]
    return list(zip(plans, model.estimates(plans), strict=True))


def _memory_thresholds(cluster: Cluster, ranked: list[Scored]) -> list[Threshold]:
    """Each plan of the Pareto front wins from the memory it needs up to that of the next faster plan."""
    winner, best = ranked[0]
    # `cluster` is without the reserve, which is taken for a share of the memory
    share = 0.0 if best.in_reserve else best.reserve_bytes / best.memory_limit
    now = best.memory_limit * (1 - share)

    def device_memory(size: float) -> float:
        return size / (1 - share) + cluster.device.context

    def order(s: Scored) -> tuple[object, ...]:
        """By time; of what fits now, nothing comes before the winner, which may be a tie that is simpler."""
        plan, e = s
        fits = e.memory_bytes <= now
        return max(e.step_seconds, best.step_seconds) if fits else e.step_seconds, plan != winner, e.step_seconds

    near = [
        (p, e)
        for p, e in ranked
        if e.host_bytes <= e.host_limit and now / MEMORY_FACTOR < e.memory_bytes < now * MEMORY_FACTOR
    ]
    front: list[tuple[Plan, Estimate, float]] = []
    for plan, e in sorted(near, key=lambda s: (*order(s), s[1].memory_bytes)):
        if not front or e.memory_bytes < front[-1][1].memory_bytes:
            front.append((plan, e, front[-1][1].memory_bytes if front else math.inf))
    winners = set(families_of(winner))
    result: dict[tuple[str, bool], Threshold] = {}
    for below, points in (
        (False, [x for x in reversed(front) if x[1].memory_bytes > now]),
        (True, [x for x in front if x[2] <= now]),
    ):
        for plan, e, until in points:
            needed, next_needs = device_memory(e.memory_bytes), device_memory(until)
            if next_needs < MIN_RANGE * needed:
                continue
            for name in families_of(plan):
                if name not in winners and (name, below) not in result:
                    ends = (next_needs, needed) if below else (needed, next_needs if next_needs < math.inf else 0.0)
                    result[name, below] = Threshold(name, str(plan), "device.memory", ends[0], below, ends[1])
    return list(result.values())
