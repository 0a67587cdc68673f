"""Chooses the algorithm that sums gradients (`allreduce`) of the best plans by price, and says what the others cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..clusters import Cluster
from ..core.units import format_bytes, format_seconds
from ..costs import Estimate
from ..costs.collectives import inner, replicas
from ..costs.gradient_algorithm import RankGroup, gradient_algorithm, gradient_seconds
from ..costs.model import CostModel
from ..plans import Plan
from ..plans.combinations import refusal
from ..schedules import ALL_REDUCE_WORDS, NATIVE
from ..theory.alpha_beta import level
from .objectives import Scored

MOST_PLANS = 8
"""Plans, best first, whose algorithm is chosen. The others keep `auto`."""
LEAST_GAIN = 0.05
"""Share of the step that a named algorithm must save before it replaces `auto`: prices of schedules are off by about a
tenth. A smaller share follows differences that are not there."""


def choose_algorithms(ranked: Sequence[Scored], model: CostModel, cluster: Cluster) -> list[Scored]:
    """The plans, best first, each with its cheapest algorithm, where the cluster leaves a choice."""
    chosen = [_cheapest(plan, e, model, cluster) for plan, e in ranked[:MOST_PLANS]]
    return [*chosen, *ranked[MOST_PLANS:]]


def _cheapest(plan: Plan, estimate: Estimate, model: CostModel, cluster: Cluster) -> Scored:
    best = plan, estimate
    for word in other_words(plan, cluster):
        variant = replace(plan, allreduce=word)
        e = model.estimate(variant)
        if e.fits and e.step_seconds < best[1].step_seconds - LEAST_GAIN * e.step_seconds:
            best = variant, e
    return best


def comparable_algorithms(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Algorithms whose prices can be compared with the backend's: all between CPU hosts, on one host the measured ones.

    On one host a schedule costs more than its messages: the links do not show what running it in Python costs.
    """
    if cluster.device.kind != "cpu" or plan.processes == 1:
        return ()
    names = ALL_REDUCE_WORDS[2:]
    if level(plan.ranks, cluster) is None:
        return names
    return tuple(name for name in names if cluster.algorithm_table("all_reduce", plan.ranks, name))


def other_words(plan: Plan, cluster: Cluster) -> list[str]:
    """Values of `allreduce` that a plan could have instead, where the cluster leaves a choice."""
    names = comparable_algorithms(plan, cluster)
    words = [word for word in (NATIVE, *names) if names and word != plan.allreduce]
    return [word for word in words if not refusal(replace(plan, allreduce=word))]


def describe_algorithm(plan: Plan, cluster: Cluster) -> str:
    """One sentence: the algorithm, its price for a bucket and the two cheapest others; empty without a choice."""
    if plan.sync != "allreduce" or not comparable_algorithms(plan, cluster):
        return ""
    sharded = plan.zero in (1, 2)
    group = RankGroup(plan.shards, inner(plan)) if sharded else RankGroup(*replicas(plan))
    name = gradient_algorithm(plan, group, cluster)
    if group.ranks == 1:
        return ""

    def seconds(word: str) -> float:
        variant = replace(plan, allreduce=word)
        collectives = ("reduce_scatter", "all_gather") if sharded else ("all_reduce",)
        return sum(gradient_seconds(c, group, plan.bucket, variant, cluster) for c in collectives)

    others = sorted((seconds(word), word) for word in other_words(plan, cluster) if word != name)
    if not others:
        return ""
    rest = ", ".join(f"{format_seconds(t)} by {_called(word)}" for t, word in others[:2])
    return (
        f"Gradients are summed by {_called(name)}{' (allreduce=auto)' if plan.allreduce == 'auto' else ''}: "
        f"{format_seconds(seconds(name))} for {format_bytes(plan.bucket)}; the next are {rest}."
    )


def _called(word: str) -> str:
    return "the backend's own algorithm" if word == NATIVE else word
