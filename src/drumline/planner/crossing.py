"""What would have to change for another family of plans to win: where the order of the best plans turns over.

Links and batches are changed step by step and the best layouts priced anew; where another family comes first, the place
is found by bisection. Memory needs no trial: among plans that are priced, who wins at which size can be read off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..clusters import Cluster, Link, CollectiveTable
from ..core.units import format_bytes, format_rate
from ..costs import Estimate
from ..models.profile import Profile
from ..plans import Plan
from .families import families_of
from .objectives import Scored
from .prices import estimates, prices, seconds
from .space import spared
from .splitting import MOST_ACTIONS

if TYPE_CHECKING:
    from .prices import Prices

FACTORS = (4.0, 16.0, 64.0)
"""By how much a number is changed, up and down, until another family wins."""
MOST = 5
"""Layouts of every combination of families that are priced anew, each with its best number of micro-batches."""
FAR = 8.0
"""Memory is looked at down to so small a part of what there is, and up to so many times it."""
WIDE = 1.05
"""Sizes of memory within which a plan wins, the largest over the smallest; less is not worth a word."""
FINE = 1.03
"""A crossing is known to within so much."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """From where on a plan of another family wins."""

    family: str
    plan: str
    key: str
    """`node.link.bandwidth`, `network.link.bandwidth`, `messages` (seconds over measured ones), `device.memory` or
    `batch`."""
    value: float
    below: bool
    """Whether it wins below the value, or above it."""
    until: float = 0.0
    """Of memory: the other end, where it wins no more; 0 where there is none."""

    def __str__(self) -> str:
        if self.key == "messages":
            return f"if messages took {self.value:.2g} times as long as measured"
        if self.key == "batch":
            more = "or fewer" if self.below else "or more"
            return f"at {self.value:.0f} samples a step {more}" if self.value > 1 else "at one sample a step"
        if self.key == "device.memory":
            ends = sorted(x for x in (self.value, self.until) if x)
            return f"with {' to '.join(map(format_bytes, ends))} a device{' or more' if len(ends) == 1 else ''}"
        where = "between nodes" if self.key.startswith("network") else "between devices of a node"
        return f"{'below' if self.below else 'above'} {format_rate(self.value)} {where}"


Varied = Callable[[float], tuple[Profile, "Prices", Callable[[Plan], Plan | None]]]
"""A factor -> the model with a number changed, what prices it, and a plan as it is then (None: it cannot be)."""


def crossings(profile: Profile, cluster: Cluster, ranked: list[Scored]) -> list[Crossing]:
    """For every family that some change lets win, the nearest such change of each number."""
    winner = ranked[0][0]
    plans = _layouts(ranked)
    steps = prices(profile, cluster, winner.precision)
    found = _by_memory(cluster, [*ranked, *_spared(ranked, cluster, steps)])
    for key, now, vary in _numbers(profile, cluster, steps, plans):
        nearest: dict[str, tuple[float, str]] = {}
        for name, factor, plan in _turns(winner, plans, vary):
            if name not in nearest or abs(math.log(factor)) < abs(math.log(nearest[name][0])):
                nearest[name] = factor, plan
        for name, (factor, plan) in nearest.items():
            value = float(round(now * factor)) if key == "batch" else now * factor
            found.append(Crossing(name, plan, key, value, factor < 1))
    return found


def overtaking(profile: Profile, cluster: Cluster, winner: Plan, rival: Plan) -> list[Crossing]:
    """The links at which one plan that fits is as fast as another; nothing else is compared with them."""
    found = []
    both = [winner, rival]
    for key, now, vary in _numbers(profile, cluster, prices(profile, cluster, winner.precision), both):
        if key == "batch":
            continue
        for factor in sorted((f for k in FACTORS for f in (k, 1 / k)), key=lambda f: abs(math.log(f))):
            if _order(both, vary, factor)[:1] == [rival]:
                where = _meeting(both, vary, factor)
                found.append(Crossing("", str(rival), key, now * where, where < 1))
                break
    return found


def _meeting(both: list[Plan], vary: Varied, after: float) -> float:
    """The factor from which on the second of two plans is the faster one."""
    before = 1.0
    while max(before, after) / min(before, after) > FINE:
        middle = math.sqrt(before * after)
        before, after = (before, middle) if _order(both, vary, middle)[:1] == both[1:] else (middle, after)
    return after


def _layouts(ranked: list[Scored]) -> list[Plan]:
    """The best of every layout that fits, the fastest first; of each combination of families only some."""
    found: dict[tuple[object, ...], Plan] = {}
    count: Counter[tuple[str, ...]] = Counter()
    for plan, e in ranked:
        layout = (plan.dp, plan.tp, plan.pp, plan.cp, plan.tile, plan.zero, plan.shard, plan.offload)
        if e.fits and layout not in found and count[families_of(plan)] < MOST:
            found[layout] = plan
            count[families_of(plan)] += 1
    return list(found.values())


def _numbers(
    profile: Profile, cluster: Cluster, steps: Prices, plans: list[Plan]
) -> Iterator[tuple[str, float, Varied]]:
    """What is changed: (key, its value now, the change)."""

    def linked(change: Callable[[Cluster, float], Cluster]) -> Varied:
        return lambda f: (profile, steps.on_links_of(change(cluster, f)), lambda plan: plan)

    def batched(f: float) -> tuple[Profile, Prices, Callable[[Plan], Plan | None]]:
        sized = replace(profile, batch_size=max(1, round(profile.batch_size * f)))
        # where some pipeline would take too long to play, there is no comparison
        too_long = f > 1 and any(plan.pp > 1 and plan.pp * plan.micro * f > MOST_ACTIONS for plan in plans)
        adapted = _never if too_long else lambda plan: _rebatched(plan, profile.batch_size, f)
        return sized, steps.with_batches_of(sized.batch_size), adapted

    if cluster.devices > 1 and cluster.collective:
        yield "messages", 1.0, linked(slower)
    elif cluster.devices > 1:
        yield "node.link.bandwidth", cluster.node.link.bandwidth, linked(_inside)
        if cluster.network is not None:
            yield "network.link.bandwidth", cluster.network.link.bandwidth, linked(_across)
    yield "batch", float(profile.batch_size), batched


def _turns(winner: Plan, plans: list[Plan], vary: Varied) -> Iterator[tuple[str, float, str]]:
    """(family, factor, plan) for each family that comes first on the way down, or on the way up."""
    for down in (True, False):
        seen = set(families_of(winner))
        before = 1.0
        for step in FACTORS:
            factor = 1 / step if down else step
            order = _order(plans, vary, factor)
            if not order:
                break
            new = [name for name in families_of(order[0]) if name not in seen]
            for name in new:
                near = list(dict.fromkeys([*order[:8], *_order(plans, vary, before)[:8]]))
                yield name, *_bisect(name, near, vary, before, factor)
            seen.update(new)
            before = factor


def _bisect(name: str, plans: list[Plan], vary: Varied, before: float, after: float) -> tuple[float, str]:
    """The factor from which on a plan of the family is the first, and that plan."""
    first = str(_order(plans, vary, after)[0])
    while max(before, after) / min(before, after) > FINE:
        middle = math.sqrt(before * after)
        order = _order(plans, vary, middle)
        if order and name in families_of(order[0]):
            after, first = middle, str(order[0])
        else:
            before = middle
    return after, first


def _order(plans: list[Plan], vary: Varied, factor: float) -> list[Plan]:
    """The plans that fit when a number is changed, the fastest first."""
    profile, steps, adapted = vary(factor)
    found = [other for plan in plans if (other := adapted(plan)) and other.dp * other.micro <= profile.batch_size]
    fitting = [plan for plan in found if steps.fits(plan)]
    by = seconds(steps, fitting)
    return [fitting[i] for i in sorted(range(len(fitting)), key=lambda i: by[i])]


def slower(cluster: Cluster, factor: float) -> Cluster:
    """All messages take so many times as long, measured ones too."""
    network = cluster.network
    return replace(
        cluster,
        mid_step_message_s=cluster.mid_step_message_s * factor,
        node=replace(cluster.node, link=_slow(cluster.node.link, factor)),
        network=replace(network, link=_slow(network.link, factor)) if network else None,
        collective=_slow_tables(cluster.collective, factor),
        partial_occupancy={
            k: replace(f, mid_step_message_s=f.mid_step_message_s * factor, collective=_slow_tables(f.collective, factor))
            for k, f in cluster.partial_occupancy.items()
        },
    )


def _slow_tables(tables: tuple[CollectiveTable, ...], factor: float) -> tuple[CollectiveTable, ...]:
    return tuple(replace(t, seconds=tuple(s * factor for s in t.seconds)) for t in tables)


def _slow(link: Link, factor: float) -> Link:
    return replace(link, alpha=link.alpha * factor, bandwidth=link.bandwidth / factor)


def _inside(cluster: Cluster, factor: float) -> Cluster:
    link = replace(cluster.node.link, bandwidth=cluster.node.link.bandwidth * factor)
    return replace(cluster, node=replace(cluster.node, link=link))


def _across(cluster: Cluster, factor: float) -> Cluster:
    assert cluster.network is not None
    link = replace(cluster.network.link, bandwidth=cluster.network.link.bandwidth * factor)
    return replace(cluster, network=replace(cluster.network, link=link))


def _never(plan: Plan) -> Plan | None:
    """No plan."""
    return None


def _rebatched(plan: Plan, batch: int, factor: float) -> Plan | None:
    """The plan for another batch: as many more micro-batches, or fewer; of replicas at most as many as samples."""
    samples = max(1, round(batch * factor))
    dp = min(plan.dp, samples)
    micro = min(max(1, round(plan.micro * factor)), samples // dp)
    if plan.pp > 1 and plan.schedule == "interleaved":
        micro -= micro % plan.pp
    if not micro:
        return None
    other = replace(plan, dp=dp, shard=plan.shard if dp == plan.dp else 0, micro=micro)
    return other if dp > 1 or plan.offload != "none" else replace(other, zero=0, chunk=1)


def _spared(ranked: list[Scored], cluster: Cluster, steps: Prices) -> list[Scored]:
    """What less memory would bring in: the plans that use most devices, with everything in host memory or in parts."""
    most = max(plan.ranks for plan, _ in ranked)
    whole = [p for p, _ in ranked if p.ranks == most and not p.splits_model and p.offload == "none" and p.chunk == 1]
    priced = {plan for plan, _ in ranked}
    fewest = [p for p in whole if p.zero == 3 or p.dp == 1]
    plans = [p for plan in fewest for p in spared(plan, cluster) if p not in priced]
    return list(zip(plans, estimates(steps, plans), strict=True))


def _by_memory(cluster: Cluster, ranked: list[Scored]) -> list[Crossing]:
    """Plans that nothing faster beats at their size: each wins from what it needs up to what the next faster needs."""
    now = ranked[0][1].memory_limit
    context = cluster.device.context
    held = [(p, e) for p, e in ranked if e.host_bytes <= e.host_limit and now / FAR < e.memory_bytes < now * FAR]
    front: list[tuple[Plan, Estimate, float]] = []
    for plan, e in sorted(held, key=lambda s: (s[1].step_seconds, s[1].memory_bytes)):
        if not front or e.memory_bytes < front[-1][1].memory_bytes:
            front.append((plan, e, front[-1][1].memory_bytes if front else math.inf))
    winners = set(families_of(ranked[0][0]))
    found: dict[tuple[str, bool], Crossing] = {}
    for below, points in (
        (False, [x for x in reversed(front) if x[1].memory_bytes > now]),
        (True, [x for x in front if x[2] <= now]),
    ):
        for plan, e, until in points:
            needed, next_needs = e.memory_bytes + context, until + context
            if next_needs < WIDE * needed:
                continue
            for name in families_of(plan):
                if name not in winners and (name, below) not in found:
                    ends = (next_needs, needed) if below else (needed, next_needs if next_needs < math.inf else 0.0)
                    found[name, below] = Crossing(name, str(plan), "device.memory", ends[0], below, ends[1])
    return list(found.values())
