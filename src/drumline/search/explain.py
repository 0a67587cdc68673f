"""Why the winner won, in words with numbers."""

from __future__ import annotations

from ..cluster import Cluster
from ..cost import Estimate
from ..model.profile import Profile
from ..plan import Plan
from ..units import format_bytes, format_seconds
from . import remedy

__all__ = ["explain", "reason", "remedy"]


def reason(e: Estimate, best: Estimate, plan: Plan) -> str:
    """One line for one candidate: the margin, and the part of the step that made it."""
    if e is best:
        return "fastest that fits"
    if not e.fits:
        over = e.memory_bytes - e.memory_limit
        part = max(e.memory_parts, key=lambda k: e.memory_parts[k])
        return f"needs {format_bytes(over)} more than there is, most of it {part}"
    slower = e.step_seconds / best.step_seconds - 1
    if slower < 1e-3:
        return "as fast, but with more ranks or micro-batches"
    gaps = {k: v - best.parts.get(k, 0.0) for k, v in e.parts.items()}
    part = max(gaps, key=lambda k: gaps[k])
    return f"{100 * slower:.0f}% slower: {part} takes {format_seconds(gaps[part])} more"


def explain(profile: Profile, cluster: Cluster, ranked: list[tuple[Plan, Estimate]]) -> str:
    """One paragraph: what bounds the step, how the winner uses the machine, what the runner-up family lacks."""
    plan, best = ranked[0]
    parts = sorted(((v, k) for k, v in best.parts.items() if v > 0), reverse=True)
    share = parts[0][0] / best.step_seconds
    lines = [
        f"{plan} takes {format_seconds(best.step_seconds)} a step on {plan.ranks} of {cluster.devices} "
        f"{cluster.device.name}{'s' if cluster.devices > 1 else ''}; {100 * share:.0f}% of it is {parts[0][1]}"
        + (f" and {100 * parts[1][0] / best.step_seconds:.0f}% {parts[1][1]}." if len(parts) > 1 else ".")
    ]
    lines.append(f"It needs {format_bytes(best.memory_bytes)} of {format_bytes(best.memory_limit)} a device.")
    if plan.ranks > 1:
        comm = best.parts["communication"]
        lines.append(
            f"Of its communication {format_seconds(best.hidden_seconds)} hides behind computation and "
            f"{format_seconds(comm)} does not."
        )
    rival = _rival(ranked)
    if rival is not None:
        lines.append(f"The best plan of another kind is {rival[0]}: {reason(rival[1], best, rival[0])}.")
    unfit = sum(1 for _, e in ranked if not e.fits)
    if unfit:
        lines.append(f"{unfit} of {len(ranked)} candidates do not fit.")
    return " ".join(lines)


def _rival(ranked: list[tuple[Plan, Estimate]]) -> tuple[Plan, Estimate] | None:
    """The best candidate that differs from the winner in its ranks or in what it shards."""
    winner = ranked[0][0]
    for plan, e in ranked[1:]:
        if (plan.dp, plan.zero) != (winner.dp, winner.zero):
            return plan, e
    return None
