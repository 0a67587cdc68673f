"""Steps whose ranks differ and meet in every step: each pipeline stage runs at the pace of its slowest rank.

The estimate prices the slowed step, the simulator draws the same. Without a pipeline all ranks are one stage, and the
step waits for the slowest of them. In a pipeline a slow stage may hide in the bubble: the schedule's clock decides.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from ..clusters import StepTimeDistribution
from ..plans import Plan
from ..theory.order_statistics import expected_largest, largest_quantiles
from .estimate import Estimate
from .layer_time import LayerTime
from .scaled_step import scaled_step
from .step import Step

WAITED_FOR = ("forward", "backward", "recompute", "bubble", "optimizer")
"""Parts of a synchronous step in which a slow rank holds up the others."""
MOST_DRAWS, LEAST_DRAWS, ACTIONS_DRAWN = 16, 4, 8_000
"""Steps that are drawn for the expected step of a pipeline under jitter, and the actions in all of them."""


def of_stages(factors: Sequence[float], stages: int) -> list[Sequence[float]]:
    """The factors of the ranks of every pipeline stage; its ranks follow each other."""
    each = len(factors) // stages
    return [factors[s * each : (s + 1) * each] for s in range(stages)]


def slowest_of_stages(factors: Sequence[float], stages: int) -> list[float]:
    """The factor of every pipeline stage: that of its slowest replica or tensor-parallel rank."""
    return [max(own) for own in of_stages(factors, stages)]


def slowed_step(step: Step, factors: Sequence[float]) -> Step:
    """The step whose pipeline ranks compute at these paces. Messages and overhead take as long as before."""
    tails = tuple(
        tuple(replace(p, seconds=f * p.seconds) if p.part == "optimizer" else p for p in tail)
        for f, tail in zip(factors, step.tails, strict=True)
    )
    if step.pipeline is None:
        layers = [
            LayerTime(x.layer, *(factors[0] * t for t in (x.forward, x.backward, x.recompute))) for x in step.layers
        ]
        return replace(step, layers=layers, tails=tails).with_pipeline(None)
    return replace(step, tails=tails).with_pipeline(step.pipeline.at_pace(factors))


def with_stragglers(even: Estimate, step: Step, spread: StepTimeDistribution) -> Estimate:
    """The expected step if ranks differ, from the estimate for even ranks and the operator model's step of the plan."""
    if not spread:
        return even
    parts = with_waiting(even.parts, expected_waiting(scaled_step(step, even), spread))
    seconds = sum(parts.values())
    raw = even.raw_seconds * seconds / even.step_seconds if even.step_seconds else 0.0
    return replace(even, parts=parts, step_seconds=seconds, raw_seconds=raw)


def expected_waiting(step: Step, spread: StepTimeDistribution) -> float:
    """Seconds that a step is expected to take longer than with even ranks."""
    plan = step.plan
    if plan.pp == 1:
        draws: list[list[float]] = [[expected_largest(spread.factors(plan.ranks), spread.jitter)]]
    else:
        draws = _draws(step, spread)
    return sum(slowed_step(step, own).seconds for own in draws) / len(draws) - step.seconds


def _draws(step: Step, spread: StepTimeDistribution) -> list[list[float]]:
    """Factors of the pipeline stages in some steps: of each stage, evenly spread quantiles in a random order.

    They are the same for all plans with as many ranks in a stage, so that plans are compared by the same steps.
    """
    plan = step.plan
    means = of_stages(spread.factors(plan.ranks), plan.pp)
    if not spread.jitter:
        return [[max(own) for own in means]]
    assert step.pipeline is not None
    order, chance = step.pipeline.order, random.Random("factors of pipeline stages")
    count = max(LEAST_DRAWS, min(MOST_DRAWS, ACTIONS_DRAWN // (2 * order.stages * order.micros)))
    columns = []
    for own in means:
        column = list(largest_quantiles(tuple(own), spread.jitter, count))
        chance.shuffle(column)
        columns.append(column)
    return [list(row) for row in zip(*columns, strict=True)]


def with_waiting(parts: dict[str, float], more: float) -> dict[str, float]:
    """The parts of a synchronous step that takes some seconds longer, or less long, because its ranks differ."""
    if more >= 0.0:
        return {**parts, "waiting": more}
    compute = sum(parts.get(k, 0.0) for k in WAITED_FOR)
    return {k: v * (1.0 + more / compute) if k in WAITED_FOR else v for k, v in parts.items()}


def waiting_words(plan: Plan) -> str:
    """Words for the part `waiting` of a plan whose ranks differ."""
    if plan.pp == 1:
        return f"for the slowest of {plan.ranks} ranks in every step"
    return f"{plan.schedule} timed with every stage as fast as its slowest rank, less the step of even ranks"
