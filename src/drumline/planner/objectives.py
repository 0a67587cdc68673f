"""Objectives of a search: step time, memory per device, or cost; and the Pareto front of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import InputError, nearest
from ..costs import Estimate
from ..plans import Plan

OBJECTIVES = {
    "time": "shortest step",
    "memory": "least memory per device",
    "cost": "fewest device hours: step time x devices in use",
}
"""Values of `--objective`."""

WON = {"time": "fastest plan that fits", "memory": "needs the least memory", "cost": "costs the least"}
"""Reason of the winner, by objective."""

Scored = tuple[Plan, Estimate]


def best_first(objective: str) -> Callable[[Scored], tuple[float, ...]]:
    """Sort key of plans that fit; of equals, the simpler one comes first."""
    if objective not in OBJECTIVES:
        raise InputError(
            f"--objective {objective}", rule=f"one of {', '.join(OBJECTIVES)}", fix=nearest(objective, OBJECTIVES)
        )
    return lambda scored: (*(value(*scored, o) for o in (objective, "time")), *complexity(scored[0]))


def value(plan: Plan, e: Estimate, objective: str) -> float:
    """The quantity that an objective minimises: seconds, bytes or device seconds."""
    if objective == "memory":
        return e.memory_bytes
    return e.step_seconds * (plan.ranks if objective == "cost" else 1)


def complexity(plan: Plan) -> tuple[int, ...]:
    """Ranks, split parts, micro-batches, sharding: fewer is simpler."""
    return plan.ranks, plan.ranks // plan.dp, plan.micro, plan.zero, plan.shards


def pareto(scored: Sequence[Scored]) -> list[Scored]:
    """Plans that fit and that no other plan beats in both time and memory, fastest first."""
    front: list[Scored] = []
    for plan, e in sorted((s for s in scored if s[1].fits), key=lambda s: (s[1].step_seconds, s[1].memory_bytes)):
        if not front or e.memory_bytes < front[-1][1].memory_bytes:
            front.append((plan, e))
    return front
