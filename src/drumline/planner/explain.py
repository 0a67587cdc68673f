"""Why the best plan wins and why the alternatives lose, in words with numbers."""

from __future__ import annotations

from dataclasses import replace

from ..clusters import Cluster
from ..core.units import format_bytes, format_seconds
from ..costs import Estimate
from ..models.profile import Profile
from ..plans import Plan
from .bottlenecks import bottlenecks
from .break_even import Threshold, link_thresholds, thresholds
from .gradient_algorithms import describe_algorithm
from .objectives import WON, Scored, complexity, value
from .plan_families import FAMILIES, PlanFamily, absent, best_of_each, compare, families_of
from .tradeoffs import describe_tradeoffs

MIN_SHARE = 0.05
"""Smaller parts of a step are not mentioned."""

_BOUND = {
    "products": "matmuls",
    "memory": "memory bandwidth",
    "launches": "kernel launches",
    "communication": "exposed communication",
    "bubble": "the pipeline bubble",
    "optimizer": "the optimizer update",
    "overhead": "the time between two steps",
}
_SHARE = {"products": "matmuls", "memory": "memory bandwidth", "launches": "kernel launches"}


def reason(e: Estimate, best: Estimate, plan: Plan, objective: str = "time") -> str:
    """One line for one candidate: its margin, and the part of the step that causes it."""
    if e is best:
        return WON[objective]
    if not e.fits:
        where, over = e.lacks
        if where == "host":
            return f"exceeds host memory by {format_bytes(over)}"
        part = max(e.memory_parts, key=lambda k: e.memory_parts[k])
        return f"exceeds device memory by {format_bytes(over)}, mostly {part}"
    if objective == "memory":
        extra = e.memory_bytes - best.memory_bytes
        return f"needs {format_bytes(extra)} more, takes {format_seconds(e.step_seconds)}"
    winner = Plan.parse(best.plan) if objective == "cost" else plan
    slower = value(plan, e, objective) / value(winner, best, objective) - 1
    if slower < 1e-3:
        more = complexity(plan) > complexity(Plan.parse(best.plan))
        return "as fast, but with more ranks, micro-batches or sharding" if more else "as fast, and simpler"
    gaps = {k: v - best.parts.get(k, 0.0) for k, v in e.parts.items()}
    part = max(gaps, key=lambda k: gaps[k])
    margin = f"{100 * slower:.{0 if slower >= 0.01 else 1}f}%"
    if objective == "cost":
        return f"{margin} more device hours: {plan.ranks} devices for {format_seconds(e.step_seconds)}"
    return f"{margin} slower: {part} takes {format_seconds(gaps[part])} more"


def compare_families(
    profile: Profile, cluster: Cluster, ranked: list[Scored], objective: str, *, break_even: bool
) -> tuple[PlanFamily, ...]:
    """The best of each family against the winner; with `break_even`, what would make it the fastest."""
    best = ranked[0][1]
    changes = thresholds(profile, cluster, ranked) if break_even and objective == "time" else []
    each = best_of_each(ranked)
    rows = []
    for name in FAMILIES:
        if name not in each:
            rows.append(absent(name, profile, cluster))
            continue
        plan, e = each[name]
        wins_if = tuple(_with_plan(t, str(plan)) for t in changes if t.family == name)
        rows.append(compare(name, plan, e, best, reason(e, best, plan, objective), wins_if))
    return tuple(rows)


def _with_plan(threshold: Threshold, plan: str) -> str:
    return str(threshold) if threshold.plan == plan else f"{threshold}, as {threshold.plan}"


def explain(
    profile: Profile,
    cluster: Cluster,
    ranked: list[Scored],
    families: tuple[PlanFamily, ...] = (),
    objective: str = "time",
    *,
    break_even: bool = False,
    too_large: str = "",
) -> str:
    """One paragraph: what bounds the step, how the best plan uses the machine, why the alternatives lose.

    `too_large` is the number of candidates that do not fit, such as `12 of 80`.
    """
    plan, best = ranked[0]
    lines = [
        f"{plan} takes {format_seconds(best.step_seconds)} per step on {plan.ranks} of {cluster.devices} "
        f"{cluster.device.name}{'s' if cluster.devices > 1 else ''}.",
        _bottleneck(profile, plan, best, cluster),
        f"It needs {format_bytes(best.memory_bytes)} of {format_bytes(best.memory_limit)} per device.",
        *describe_tradeoffs(profile, plan, best, cluster),
    ]
    if plan.ranks > 1:
        lines.append(
            f"{format_seconds(best.hidden_seconds)} of its communication is hidden behind compute, "
            f"{format_seconds(best.parts['communication'])} is exposed."
        )
        lines.append(describe_algorithm(plan, cluster))
    if plan.ranks < cluster.devices:
        lines.append(_idle_devices(ranked, cluster, objective))
    lines += _less_sharding(ranked, objective)
    lines += _alternatives(profile, cluster, ranked, families, objective, break_even)
    if too_large:
        lines.append(f"{too_large} candidates do not fit.")
    return " ".join(filter(None, lines))


def _bottleneck(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> str:
    """Where the time goes, and the fraction of the peak that the step reaches."""
    bounds = bottlenecks(profile, plan, e, cluster)
    first, *rest = [(k, v) for k, v in bounds.shares.items() if v >= MIN_SHARE or k == bounds.first]
    others = ", ".join(f"{100 * v:.0f}% {_SHARE.get(k, k)}" for k, v in rest)
    return (
        f"It is bound by {_BOUND[first[0]]}: {100 * first[1]:.0f}% of the step{f', then {others}' if others else ''}; "
        f"it reaches {100 * bounds.utilisation:.{0 if bounds.utilisation >= 0.1 else 1}f}% of the peak."
    )


def _idle_devices(ranked: list[Scored], cluster: Cluster, objective: str) -> str:
    """Why devices stay idle."""
    winner, best = ranked[0]
    idle = cluster.devices - winner.ranks
    text = f"{idle} {'device stays' if idle == 1 else 'devices stay'} idle"
    most = max(plan.ranks for plan, _ in ranked)
    if most == winner.ranks:
        return f"{text}: no plan can use more."
    plan, e = next((p, e) for p, e in ranked if p.ranks == most)
    return f"{text}: on {most}, {plan} {_clause(e, best, plan, objective)}."


def _clause(e: Estimate, best: Estimate, plan: Plan, objective: str) -> str:
    """The reason with its verb."""
    is_adjective = e.fits and objective != "memory"
    return f"{'is ' if is_adjective else ''}{reason(e, best, plan, objective)}"


def _less_sharding(ranked: list[Scored], objective: str) -> list[str]:
    """How the same ranks compare with less sharding, and without offload."""
    winner, best = ranked[0]
    variants = []
    for zero in range(winner.zero):
        # the first of its kind is the fastest or, if none fits, the one that needs the least memory
        kind = _kind(replace(winner, zero=zero, offload="none"))
        plan, e = next((x for x in ranked if _kind(x[0]) == kind), (winner, best))
        if e is not best:
            variants.append(f"zero={zero} {_clause(e, best, plan, objective)}")
    lines = [f"With less sharding: {'; '.join(variants)}."] if variants else []
    if winner.offload != "none":
        kept = min((e for plan, e in ranked if plan.offload == "none"), key=lambda e: e.memory_bytes, default=None)
        if kept is not None and not kept.fits:
            lines.append(f"Nothing fits without offload: the closest, {kept.plan}, {reason(kept, best, winner)}.")
    return lines


def _alternatives(
    profile: Profile,
    cluster: Cluster,
    ranked: list[Scored],
    families: tuple[PlanFamily, ...],
    objective: str,
    break_even: bool,
) -> list[str]:
    """The best plan of another kind, and what would make another family the fastest."""
    winner, best = ranked[0]
    rival = next(((p, e) for p, e in ranked[1:] if e.fits and _kind(p) != _kind(winner)), None)
    lines = []
    if rival is not None:
        text = reason(rival[1], best, rival[0], objective)
        links = link_thresholds(profile, cluster, winner, rival[0]) if break_even and objective == "time" else []
        wins = f"; it becomes faster {', or '.join(map(str, links))}" if links else ""
        lines.append(f"The best alternative is {rival[0]}: {text}{wins}.")
    own = set(families_of(winner))
    changes = [f"{f.name} {_without_plans(f.wins_if)}" for f in families if f.wins_if and f.name not in own]
    if changes:
        lines.append(f"Other families become the fastest: {'; '.join(changes)}.")
    return lines


def _without_plans(wins_if: tuple[str, ...]) -> str:
    """Join changes without their plans, which the table of families shows."""
    return ", or ".join(change.partition(", as ")[0] for change in wins_if)


def _kind(plan: Plan) -> tuple[object, ...]:
    """Keys that make two plans different at first sight."""
    return plan.dp, plan.tp, plan.pp, plan.cp, plan.tile, plan.zero, plan.offload
