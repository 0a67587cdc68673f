"""What is sought: the least time of a step, memory of a device, or price; and the plans that nothing beats in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import InputError, nearest
from ..costs import Estimate
from ..plans import Plan

OBJECTIVES = {
    "time": "the least seconds a step",
    "memory": "the least memory a device",
    "cost": "the least device hours: seconds times the devices that are used",
}
"""What `--objective` takes."""

WON = {"time": "fastest that fits", "memory": "needs least memory", "cost": "costs least"}

Scored = tuple[Plan, Estimate]


def order(objective: str) -> Callable[[Scored], tuple[float, ...]]:
    """What plans that fit are sorted by, the best first. Of equals, the one with less effort stands first."""
    if objective not in OBJECTIVES:
        raise InputError(
            f"--objective {objective}", rule=f"one of {', '.join(OBJECTIVES)}", fix=nearest(objective, OBJECTIVES)
        )
    return lambda scored: (*(value(*scored, o) for o in (objective, "time")), *effort(scored[0]))


def value(plan: Plan, e: Estimate, objective: str) -> float:
    """What an objective makes small: seconds, bytes or device seconds."""
    if objective == "memory":
        return e.memory_bytes
    return e.step_seconds * (plan.ranks if objective == "cost" else 1)


def effort(plan: Plan) -> tuple[int, ...]:
    """Fewer ranks, less splitting, fewer micro-batches, less sharding."""
    return plan.ranks, plan.ranks // plan.dp, plan.micro, plan.zero, plan.shards


def pareto(scored: Sequence[Scored]) -> list[Scored]:
    """Of the plans that fit, those that no other beats in both time and memory, the fastest first."""
    front: list[Scored] = []
    for plan, e in sorted((s for s in scored if s[1].fits), key=lambda s: (s[1].step_seconds, s[1].memory_bytes)):
        if not front or e.memory_bytes < front[-1][1].memory_bytes:
            front.append((plan, e))
    return front
