"""Why the winner won, in words with numbers."""

from __future__ import annotations

from dataclasses import replace

from ..cluster import Cluster
from ..cost import Estimate
from ..model.profile import Profile
from ..plan import Plan
from ..units import format_bytes, format_seconds
from .sharing import how_it_shares

__all__ = ["explain", "reason"]

Ranked = list[tuple[Plan, Estimate]]


def reason(e: Estimate, best: Estimate, plan: Plan) -> str:
    """One line for one candidate: the margin, and the part of the step that made it."""
    if e is best:
        return "fastest that fits"
    if not e.fits:
        where, over = e.lacks
        if where == "host":
            return f"needs {format_bytes(over)} more than there is of host memory"
        part = max(e.memory_parts, key=lambda k: e.memory_parts[k])
        return f"needs {format_bytes(over)} more than there is, most of it {part}"
    slower = e.step_seconds / best.step_seconds - 1
    if slower < 1e-3:
        return "as fast, but with more ranks, micro-batches or sharding"
    gaps = {k: v - best.parts.get(k, 0.0) for k, v in e.parts.items()}
    part = max(gaps, key=lambda k: gaps[k])
    return f"{100 * slower:.{0 if slower >= 0.01 else 1}f}% slower: {part} takes {format_seconds(gaps[part])} more"


def explain(profile: Profile, cluster: Cluster, ranked: Ranked) -> str:
    """One paragraph: what bounds the step, how the winner uses the machine, what the others lack."""
    plan, best = ranked[0]
    parts = sorted(((v, k) for k, v in best.parts.items() if v > 0), reverse=True)
    share = parts[0][0] / best.step_seconds
    lines = [
        f"{plan} takes {format_seconds(best.step_seconds)} a step on {plan.ranks} of {cluster.devices} "
        f"{cluster.device.name}{'s' if cluster.devices > 1 else ''}; {100 * share:.0f}% of it is {parts[0][1]}"
        + (f" and {100 * parts[1][0] / best.step_seconds:.0f}% {parts[1][1]}." if len(parts) > 1 else ".")
    ]
    lines.append(f"It needs {format_bytes(best.memory_bytes)} of {format_bytes(best.memory_limit)} a device.")
    lines += how_it_shares(profile, plan, best, cluster)
    if plan.ranks > 1:
        comm = best.parts["communication"]
        lines.append(
            f"Of its communication {format_seconds(best.hidden_seconds)} hides behind computation and "
            f"{format_seconds(comm)} does not."
        )
    lines += _less(ranked)
    rival = _rival(ranked)
    if rival is not None:
        lines.append(f"The best plan of another kind is {rival[0]}: {reason(rival[1], best, rival[0])}.")
    unfit = sum(1 for _, e in ranked if not e.fits)
    if unfit:
        lines.append(f"{unfit} of {len(ranked)} candidates do not fit.")
    return " ".join(lines)


def _less(ranked: Ranked) -> list[str]:
    """What the same ranks would lack with less sharding, and with nothing offloaded."""
    winner, best = ranked[0]
    found = []
    for zero in range(winner.zero):
        # the first is the best of its kind: the fastest, or, if none fits, the one that lacks least
        kind = _kind(replace(winner, zero=zero, offload="none"))
        of_kind = (x for x in ranked if _kind(x[0]) == kind)
        plan, e = next(of_kind, (winner, best))
        if e is not best:
            found.append(f"zero={zero} {_verb(e)} {reason(e, best, plan)}")
    lines = [f"With less sharding: {'; '.join(found)}."] if found else []
    if winner.offload != "none":
        kept = min((e for plan, e in ranked if plan.offload == "none"), key=lambda e: e.memory_bytes, default=None)
        if kept is not None and not kept.fits:
            lines.append(f"Without offloading nothing fits: at best {kept.plan} {reason(kept, best, winner)}.")
    return lines


def _verb(e: Estimate) -> str:
    return "is" if e.fits else "at best"


def _rival(ranked: Ranked) -> tuple[Plan, Estimate] | None:
    """The best that fits and differs from the winner in its ranks, in what it shards or in what it offloads."""
    winner = ranked[0][0]
    for plan, e in ranked[1:]:
        if e.fits and _kind(plan) != _kind(winner):
            return plan, e
    return None


def _kind(plan: Plan) -> tuple[object, ...]:
    """What tells plans apart at first sight."""
    return plan.dp, plan.tp, plan.pp, plan.cp, plan.tile, plan.zero, plan.offload
