"""Why the best plan wins and why the alternatives lose, in words with numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..clusters import Cluster
from ..core.units import format_bytes, format_seconds
from ..costs import Estimate
from ..models.profile import Profile
from ..plans import Plan
from ..plans.sync_caveats import sync_caveat
from .bottlenecks import bottlenecks
from .break_even import Threshold, link_thresholds, thresholds
from .gradient_algorithms import describe_algorithm
from .objectives import WON, Scored, complexity, is_tie, tie_width, value
from .plan_families import FAMILIES, PlanFamily, absent, best_of_each, compare, families_of
from .stale_plans import StaleVerdict, is_stale
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
    "waiting": "waiting for slower ranks",
}
_SHARE = {"products": "matmuls", "memory": "memory bandwidth", "launches": "kernel launches"}


def winner_reason(ranked: list[Scored], objective: str = "time") -> str:
    """Why the first plan is proposed: it is the best, or the simplest of those that tie with it."""
    plan, e = ranked[0]
    tied, fastest = _ties(ranked, objective)
    won = WON[objective] if fastest[0] == plan else f"simplest of {tied} plans within {_width(e)} of the best"
    tight = "fits only into the reserve" if e.in_reserve else ""
    return "; ".join(filter(None, [won, tight, sync_caveat(plan)]))


def _ties(ranked: list[Scored], objective: str) -> tuple[int, Scored]:
    """How many exact plans tie with the best value, and the plan that has it."""
    rivals = [s for s in ranked if s[1].fits and s[1].in_reserve == ranked[0][1].in_reserve and not is_stale(s[0])]
    if is_stale(ranked[0][0]):
        return 1, ranked[0]
    values = [value(*s, objective) for s in rivals]
    least = min(values)
    # of equal values the winner's counts
    fastest = ranked[0] if value(*ranked[0], objective) <= least else rivals[values.index(least)]
    return sum(is_tie(least, v, objective, tie_width(ranked[0][1].error)) for v in values), fastest


def tie_reference(ranked: list[Scored], objective: str) -> float:
    """The value that ties are counted from: the least of the exact plans that fit."""
    plan, e = _ties(ranked, objective)[1]
    return value(plan, e, objective)


def _width(e: Estimate) -> str:
    return f"{100 * tie_width(e.error):.0f}%"


def reason(e: Estimate, best: Estimate, plan: Plan, objective: str = "time", least: float | None = None) -> str:
    """One line for one candidate: its margin over the proposed plan, and the part of the step that causes it.

    Ties are counted from the `least` value of all plans, which is the proposed plan's if none is given.
    """
    if e is best:
        return winner_reason([(plan, e)], objective)
    if e.in_reserve and not best.in_reserve:
        return f"fits only into the reserve: {format_bytes(e.memory_limit - e.memory_bytes)} left"
    if not e.fits:
        where, over = e.lacks
        if where == "host":
            return f"exceeds host memory by {format_bytes(over)}"
        part = max(e.memory_parts, key=lambda k: e.memory_parts[k])
        return f"exceeds device memory by {format_bytes(over)}, mostly {part}"
    if objective == "memory":
        extra = e.memory_bytes - best.memory_bytes
        return f"needs {format_bytes(extra)} more, takes {format_seconds(e.step_seconds)}"
    slower = value(plan, e, objective) / value(_parsed(best.plan), best, objective) - 1
    margin = f"{abs(100 * slower):.{0 if abs(slower) >= 0.01 else 1}f}%"
    if is_stale(plan) and slower < 1e-3:
        return f"{f'{margin} faster' if slower < -1e-3 else 'as fast'}, but {sync_caveat(plan)}"
    if plan.backup and slower >= 1e-3:
        return f"{margin} slower: the gradients of {plan.backup} of {plan.dp} replicas do not count"
    if is_tied(e, best, plan, objective, least):
        return f"tie: {_tie(slower, objective, _width(best))}, {_compare_complexity(plan, _parsed(best.plan))}"
    gaps = {k: v - best.parts.get(k, 0.0) for k, v in e.parts.items()}
    part = max(gaps, key=lambda k: gaps[k])
    if objective == "cost":
        return f"{margin} more device hours: {plan.ranks} devices for {format_seconds(e.step_seconds)}"
    return f"{margin} slower: {part} takes {format_seconds(gaps[part])} more"


def is_tied(e: Estimate, best: Estimate, plan: Plan, objective: str, least: float | None = None) -> bool:
    """Whether a candidate and the proposed plan are equivalent: both are exact, fit alike, and tie with `least`.

    Without it, the faster of the two is the least.
    """
    if objective == "memory" or not e.fits or e.in_reserve != best.in_reserve or is_stale(plan) or plan.backup:
        return False
    winner = _parsed(best.plan)
    own, other = value(plan, e, objective), value(winner, best, objective)
    return not is_stale(winner) and is_tie(least or min(own, other), max(own, other), objective, tie_width(best.error))


def _tie(slower: float, objective: str, width: str) -> str:
    if abs(slower) < 1e-3:
        return "as fast" if objective == "time" else "as many device hours"
    unit = ("slower", "faster") if objective == "time" else ("more device hours", "fewer device hours")
    return f"within {width} ({abs(100 * slower):.1f}% {unit[slower < 0]})"


def _compare_complexity(plan: Plan, winner: Plan) -> str:
    if plan.ranks < winner.ranks:
        return "but on fewer devices"
    more = complexity(plan) > complexity(winner)
    return "but less simple" if more else "and simpler"


@lru_cache(maxsize=64)
def _parsed(notation: str) -> Plan:
    return Plan.parse(notation)


def compare_families(
    profile: Profile,
    cluster: Cluster,
    ranked: list[Scored],
    objective: str,
    *,
    break_even: bool,
    allow_stale: bool = False,
) -> tuple[PlanFamily, ...]:
    """The best of each family against the winner; with `break_even`, what would make it the fastest."""
    best = ranked[0][1]
    # approximate plans win by a margin that is no price, so no threshold is computed for or against them
    exact = [s for s in ranked if not is_stale(s[0])]
    asked = break_even and objective == "time" and not is_stale(ranked[0][0])
    changes = thresholds(profile, cluster, exact) if asked else []
    each = best_of_each(ranked)
    least = tie_reference(ranked, objective)
    rows = []
    for name in FAMILIES:
        if name not in each:
            rows.append(absent(name, profile, cluster, allow_stale=allow_stale, precision=ranked[0][0].precision))
            continue
        plan, e = each[name]
        wins_if = tuple(_with_plan(t, str(plan)) for t in changes if t.family == name)
        why = winner_reason(ranked, objective) if e is best else reason(e, best, plan, objective, least)
        rows.append(compare(name, plan, e, best, why, wins_if))
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
    stale: StaleVerdict | None = None,
) -> str:
    """One paragraph: what bounds the step, how the best plan uses the machine, why the alternatives lose.

    `too_large` is the number of candidates that do not fit, such as `12 of 80`. `stale` is about plans whose replicas
    do not wait for each other, where they are allowed.
    """
    plan, best = ranked[0]
    lines = [
        idle_devices(ranked, cluster, objective),
        *_step_and_memory(profile, plan, best, cluster),
        _tight(best),
        _simplest(ranked, objective),
        *describe_tradeoffs(profile, plan, best, cluster),
    ]
    if stale is not None:
        lines.append(stale.sentence)
    lines += _communication(plan, best, cluster)
    lines += _less_sharding(ranked, objective)
    lines += _alternatives(profile, cluster, ranked, families, objective, break_even)
    if too_large:
        kept = best.reserve_bytes and not best.in_reserve
        lines.append(f"{too_large} candidates do not fit{', or only into the reserve' if kept else ''}.")
    return " ".join(filter(None, lines))


def explain_plan(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> str:
    """One paragraph about a plan that was given: what bounds its step, and how it uses the machine.

    Empty without a predicted step, or if the machines do not have the plan's ranks, as in an edited run folder.
    """
    if not any(e.parts.values()) or plan.ranks > cluster.devices:
        return ""
    lines = [
        *_step_and_memory(profile, plan, e, cluster),
        "" if e.fits else f"It does not fit: {e.lacks[0]} memory lacks {format_bytes(e.lacks[1])}.",
        *describe_tradeoffs(profile, plan, e, cluster),
        *_communication(plan, e, cluster),
        sync_caveat(plan),
    ]
    return " ".join(filter(None, lines))


def _step_and_memory(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> list[str]:
    return [
        f"{plan} takes {format_seconds(e.step_seconds)} per step on {plan.ranks} of {cluster.devices} "
        f"{cluster.device.name}{'s' if cluster.devices > 1 else ''}.",
        _bottleneck(profile, plan, e, cluster),
        f"A device needs {e.memory_text}.",
    ]


def _communication(plan: Plan, e: Estimate, cluster: Cluster) -> list[str]:
    if plan.ranks == 1:
        return []
    return [
        f"{format_seconds(e.hidden_seconds)} of its communication is hidden behind compute, "
        f"{format_seconds(e.parts.get('communication', 0.0))} is exposed.",
        describe_algorithm(plan, cluster),
    ]


def _tight(e: Estimate) -> str:
    """A warning where the plan uses memory that should stay free."""
    if not e.in_reserve:
        return ""
    return (
        f"No plan leaves {format_bytes(e.reserve_bytes)} of a device free (--reserve); this is the best that fits at "
        "all, and so close to the limit steps may take longer or run out of memory."
    )


def _simplest(ranked: list[Scored], objective: str) -> str:
    """Why the plan is proposed although another one is priced a little lower."""
    plan, best = ranked[0]
    tied, (other, e) = _ties(ranked, objective)
    if other == plan:
        return ""
    less = 1 - value(other, e, objective) / value(plan, best, objective)
    what = "device hours" if objective == "cost" else "time"
    return (
        f"It is the simplest of {tied} plans whose {what} the cost model cannot distinguish ({_width(best)}): {other} "
        f"is predicted to take {100 * less:.1f}% less."
    )


def _bottleneck(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> str:
    """Where the time goes, and the fraction of the peak that the step reaches."""
    bounds = bottlenecks(profile, plan, e, cluster)
    if not bounds.shares:  # the profile has no operators
        return ""
    first, *rest = [(k, v) for k, v in bounds.shares.items() if v >= MIN_SHARE or k == bounds.first]
    others = ", ".join(f"{100 * v:.0f}% {_SHARE.get(k, k)}" for k, v in rest)
    return (
        f"It is bound by {_BOUND[first[0]]}: {100 * first[1]:.0f}% of the step{f', then {others}' if others else ''}; "
        f"it reaches {100 * bounds.utilisation:.{0 if bounds.utilisation >= 0.1 else 1}f}% of the peak."
    )


def idle_devices(ranked: list[Scored], cluster: Cluster, objective: str) -> str:
    """How many devices the best plan leaves idle, and why; empty if it uses all."""
    winner = ranked[0][0]
    idle = cluster.devices - winner.ranks
    if idle <= 0:
        return ""
    text = f"{idle} of {cluster.devices} devices {'stays' if idle == 1 else 'stay'} idle"
    most = max(plan.ranks for plan, _ in ranked)
    if most == winner.ranks:
        return f"{text}: no plan can use more."
    plan, e = next((p, e) for p, e in ranked if p.ranks == most)
    return f"{text}: on {most}, {plan} {_clause(e, ranked, plan, objective)}."


def _clause(e: Estimate, ranked: list[Scored], plan: Plan, objective: str) -> str:
    """The reason with its verb."""
    text = reason(e, ranked[0][1], plan, objective, tie_reference(ranked, objective))
    if text.startswith("tie: "):
        return f"ties: {text.removeprefix('tie: ')}"
    is_adjective = e.fits and not e.in_reserve and objective != "memory"
    return f"{'is ' if is_adjective else ''}{text}"


def _less_sharding(ranked: list[Scored], objective: str) -> list[str]:
    """How the same ranks compare with less sharding, and without offload."""
    winner, best = ranked[0]
    variants = []
    for zero in range(winner.zero):
        # the first of its kind is the fastest or, if none fits, the one that needs the least memory
        kind = _kind(replace(winner, zero=zero, offload="none"))
        plan, e = next((x for x in ranked if _kind(x[0]) == kind), (winner, best))
        if e is not best:
            variants.append(f"zero={zero} {_clause(e, ranked, plan, objective)}")
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
    tight = best.in_reserve
    rivals = ((p, e) for p, e in ranked[1:] if e.fits and e.in_reserve == tight and _kind(p) != _kind(winner))
    rival = next(rivals, None)
    lines = []
    if rival is not None:
        text = reason(rival[1], best, rival[0], objective, tie_reference(ranked, objective))
        asked = break_even and objective == "time" and not (is_stale(winner) or is_stale(rival[0]))
        links = link_thresholds(profile, cluster, winner, rival[0]) if asked else []
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
    return plan.dp, plan.tp, plan.pp, plan.cp, plan.tile, plan.zero, plan.offload, plan.sync
