"""Caveats of plans whose replicas or stages do not wait for each other: one sentence, for people, next to its speed."""

from __future__ import annotations

from ..schedules import PIPEDREAM
from .plan import Plan


def most_delay(plan: Plan) -> int:
    """Updates between the weights of a gradient and those it is applied to, in a pipeline that does not drain: those of
    its first stage, the most of all; 0 for other plans.
    """
    if not plan.keeps_batches_in_flight:
        return 0
    return plan.pp - 1 if plan.schedule == PIPEDREAM else 1


def sync_caveat(plan: Plan) -> str:
    """The caveat about convergence of a plan, with the way to soften it; empty where it is exact."""
    p, k = plan.dp, plan.sync_steps
    if late := most_delay(plan):
        where = "those of the first stage" if plan.schedule == PIPEDREAM else "on all stages"
        remedy = "lower the learning rate" + (", or use pipedream-2bw" if late > 1 else "")
        return f"approximate: gradients are up to {late} update{'s' if late > 1 else ''} old, {where}: {remedy}"
    if p == 1 and plan.outer == "none":
        return ""
    if plan.sync == "async":
        remedy = "lower the learning rate, or use stale:k" if plan.damping != "none" else _REMEDY
        return f"approximate: gradients are about {p - 1} updates old (P - 1): {remedy}"
    if plan.sync == "hogwild":
        return (
            f"approximate: gradients are about {p - 1} updates old (P - 1), and replicas overwrite each other: "
            "lower the learning rate"
        )
    if plan.sync_mode == "stale" and k:
        remedy = "lower the learning rate, or use a smaller k" if plan.damping != "none" else _REMEDY_OF_STALE
        return f"approximate: gradients are up to {k} update{'s' if k > 1 else ''} old: {remedy}"
    if plan.backup:
        return (
            f"approximate: the slowest {plan.backup} of {p} gradients of a step are dropped, so that a step has "
            f"{p - plan.backup}/{p} of its samples, and those of a rank that is always slow never count"
        )
    if plan.sync_mode == "local":
        drift = f"replicas drift apart for {k} step{'s' if k > 1 else ''} between averages"
        return f"approximate: {drift}: use a smaller k, or sync_first for the first steps"
    if plan.sync_mode == "gossip":
        return (
            f"approximate: the {p} replicas never quite agree: average them for evaluation, and lower the learning rate"
        )
    return ""


_REMEDY = "lower the learning rate, or use stale:k or damping=inverse"
_REMEDY_OF_STALE = "lower the learning rate, or use a smaller k or damping=inverse"
