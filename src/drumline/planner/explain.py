"""Why the winner won, in words with numbers, and what the best of every other family lacks."""

from __future__ import annotations

from dataclasses import replace

from ..clusters import Cluster
from ..core.units import format_bytes, format_seconds
from ..costs import Estimate
from ..models.profile import Profile
from ..plans import Plan
from .bounds import bounds
from .crossing import Crossing, crossings, overtaking
from .families import FAMILIES, Family, absent, best_of_each, families_of, row
from .objectives import WON, Scored, effort, value
from .sharing import how_it_shares

__all__ = ["alternatives", "explain", "reason"]

SHOWN = 0.05
"""Parts of a step below this share are not worth a word."""


def reason(e: Estimate, best: Estimate, plan: Plan, objective: str = "time") -> str:
    """One line for one candidate: the margin, and the part of the step that made it."""
    if e is best:
        return WON[objective]
    if not e.fits:
        where, over = e.lacks
        if where == "host":
            return f"needs {format_bytes(over)} more than there is of host memory"
        part = max(e.memory_parts, key=lambda k: e.memory_parts[k])
        return f"needs {format_bytes(over)} more than there is, most of it {part}"
    if objective == "memory":
        extra = e.memory_bytes - best.memory_bytes
        return f"needs {format_bytes(extra)} more, takes {format_seconds(e.step_seconds)}"
    winner = Plan.parse(best.plan) if objective == "cost" else plan
    slower = value(plan, e, objective) / value(winner, best, objective) - 1
    if slower < 1e-3:
        more = effort(plan) > effort(Plan.parse(best.plan))
        return "as fast, but with more ranks, micro-batches or sharding" if more else "as fast, and simpler"
    gaps = {k: v - best.parts.get(k, 0.0) for k, v in e.parts.items()}
    part = max(gaps, key=lambda k: gaps[k])
    margin = f"{100 * slower:.{0 if slower >= 0.01 else 1}f}%"
    if objective == "cost":
        return f"{margin} more device hours: {plan.ranks} devices for {format_seconds(e.step_seconds)}"
    return f"{margin} slower: {part} takes {format_seconds(gaps[part])} more"


def alternatives(
    profile: Profile, cluster: Cluster, ranked: list[Scored], objective: str, *, turns: bool
) -> tuple[Family, ...]:
    """The best of each family against the winner; with `turns`, what would let it win, where time is sought."""
    best = ranked[0][1]
    found = crossings(profile, cluster, ranked) if turns and objective == "time" else []
    each = best_of_each(ranked)
    rows = []
    for name in FAMILIES:
        if name not in each:
            rows.append(absent(name, profile, cluster))
            continue
        plan, e = each[name]
        ways = tuple(_way(c, str(plan)) for c in found if c.family == name)
        rows.append(row(name, plan, e, best, reason(e, best, plan, objective), ways))
    return tuple(rows)


def _way(c: Crossing, plan: str) -> str:
    return str(c) if c.plan == plan else f"{c}, as {c.plan}"


def explain(
    profile: Profile,
    cluster: Cluster,
    ranked: list[Scored],
    families: tuple[Family, ...] = (),
    objective: str = "time",
    *,
    turns: bool = False,
    unfit: str = "",
) -> str:
    """One paragraph: what bounds the step, how the winner uses the machine, what the others lack.

    `unfit` says how many of how many do not fit."""
    plan, best = ranked[0]
    lines = [
        f"{plan} takes {format_seconds(best.step_seconds)} a step on {plan.ranks} of {cluster.devices} "
        f"{cluster.device.name}{'s' if cluster.devices > 1 else ''}.",
        _bound(profile, plan, best, cluster),
        f"It needs {format_bytes(best.memory_bytes)} of {format_bytes(best.memory_limit)} a device.",
        *how_it_shares(profile, plan, best, cluster),
    ]
    if plan.ranks > 1:
        comm = best.parts["communication"]
        lines.append(
            f"Of its communication {format_seconds(best.hidden_seconds)} hides behind computation and "
            f"{format_seconds(comm)} does not."
        )
    if plan.ranks < cluster.devices:
        lines.append(_idle(ranked, cluster, objective))
    lines += _less(ranked, objective)
    lines += _rival(profile, cluster, ranked, families, objective, turns)
    if unfit:
        lines.append(f"{unfit} candidates do not fit.")
    return " ".join(filter(None, lines))


def _bound(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> str:
    """Where the time goes, and how much of the peak is used."""
    found = bounds(profile, plan, e, cluster)
    first, *rest = [(k, v) for k, v in found.shares.items() if v >= SHOWN or k == found.first]
    told = ", ".join(f"{100 * v:.0f}% {k}" for k, v in rest)
    return (
        f"It is bound by {_BOUND[first[0]]}: {100 * first[1]:.0f}% of the step{f', then {told}' if told else ''}; "
        f"it reaches {100 * found.utilisation:.{0 if found.utilisation >= 0.1 else 1}f}% of the peak."
    )


_BOUND = {
    "products": "products of matrices",
    "memory": "the bandwidth of its memory",
    "launches": "the start of operators",
    "communication": "messages that nothing hides",
    "bubble": "the bubble of its pipeline",
    "optimizer": "the optimizer's update",
    "overhead": "what is between two steps",
}


def _idle(ranked: list[Scored], cluster: Cluster, objective: str) -> str:
    """Why devices are left idle."""
    winner, best = ranked[0]
    idle = cluster.devices - winner.ranks
    told = f"{idle} {'device stays' if idle == 1 else 'devices stay'} idle"
    most = max(plan.ranks for plan, _ in ranked)
    if most == winner.ranks:
        return f"{told}: no plan has work for more of them."
    plan, e = next((p, e) for p, e in ranked if p.ranks == most)
    return f"{told}: on {most}, {plan} {'is ' if e.fits else ''}{reason(e, best, plan, objective)}."


def _less(ranked: list[Scored], objective: str) -> list[str]:
    """What the same ranks would lack with less sharding, and with nothing offloaded."""
    winner, best = ranked[0]
    found = []
    for zero in range(winner.zero):
        # the first is the best of its kind: the fastest, or, if none fits, the one that lacks least
        kind = _kind(replace(winner, zero=zero, offload="none"))
        of_kind = (x for x in ranked if _kind(x[0]) == kind)
        plan, e = next(of_kind, (winner, best))
        if e is not best:
            found.append(f"zero={zero} {_verb(e)} {reason(e, best, plan, objective)}")
    lines = [f"With less sharding: {'; '.join(found)}."] if found else []
    if winner.offload != "none":
        kept = min((e for plan, e in ranked if plan.offload == "none"), key=lambda e: e.memory_bytes, default=None)
        if kept is not None and not kept.fits:
            lines.append(f"Without offloading nothing fits: at best {kept.plan} {reason(kept, best, winner)}.")
    return lines


def _verb(e: Estimate) -> str:
    return "is" if e.fits else "at best"


def _rival(
    profile: Profile, cluster: Cluster, ranked: list[Scored], families: tuple[Family, ...], objective: str, turns: bool
) -> list[str]:
    """The best that fits and is of another kind, and what would have to change for another family to win."""
    winner, best = ranked[0]
    rival = next(((p, e) for p, e in ranked[1:] if e.fits and _kind(p) != _kind(winner)), None)
    lines = []
    if rival is not None:
        told = reason(rival[1], best, rival[0], objective)
        places = overtaking(profile, cluster, winner, rival[0]) if turns and objective == "time" else []
        ahead = f"; it is ahead {', or '.join(map(str, places))}" if places else ""
        lines.append(f"The best plan of another kind is {rival[0]}: {told}{ahead}.")
    won = set(families_of(winner))
    ways = [f"{f.name} {_either(f.wins_if)}" for f in families if f.wins_if and f.name not in won]
    if ways:
        lines.append(f"Others would win: {'; '.join(ways)}.")
    return lines


def _either(ways: tuple[str, ...]) -> str:
    """Without the plans: the table of families has them."""
    return ", or ".join(way.partition(", as ")[0] for way in ways)


def _kind(plan: Plan) -> tuple[object, ...]:
    """What tells plans apart at first sight."""
    return plan.dp, plan.tp, plan.pp, plan.cp, plan.tile, plan.zero, plan.offload
