"""What composes with what: the one table that the planner offers from, the engine refuses by, and the parity tests
are generated from. A combination that is not here has no parity test, and so it does not exist.
"""

from __future__ import annotations

from dataclasses import fields

from ..errors import PlanError
from .plan import Plan

HELD: dict[str, tuple[object, ...]] = {
    "zero": (0, 3),
    "recompute": ("none", "full"),
    "precision": ("fp32", "bf16"),
    "backend": ("auto", "gloo", "nccl", "shm"),
}
"""Keys of which some values are held by parity tests, every pair of them among each other."""

FREE = frozenset({"dp", "micro", "bucket"})
"""Keys of which any value is held."""


def refusal(plan: Plan) -> str:
    """Why the engine will not run a plan, as `key=value`, or nothing when it will."""
    for f in fields(plan):
        value = getattr(plan, f.name)
        if f.name in FREE or value in HELD.get(f.name, ()) or value == f.default:
            continue
        if f.name == "shard" and value == plan.dp and plan.zero:
            continue
        return f"{f.name}={Plan.table(plan).get(f.name, value)}"
    return ""


def check(plan: Plan) -> None:
    """Refuse, by name, a plan that no parity test holds."""
    reason = refusal(plan)
    if reason:
        held = "; ".join(f"{key}: {', '.join(map(str, values))}" for key, values in HELD.items())
        raise PlanError(
            f"the engine does not run {reason}",
            where=f"plan {plan}",
            rule=f"only what a parity test holds is run: any dp, micro and bucket; {held}",
        )
