"""Objectives of a search: step time, memory per device, or cost; and the Pareto front of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..core.errors import InputError, nearest
from ..costs import Estimate
from ..costs.tuning import UNMEASURED_ERROR
from ..plans import Plan
from ..plans.plan import CHOICES
from ..plans.sync_caveats import sync_caveat

OBJECTIVES = {
    "time": "shortest step",
    "memory": "least memory per device",
    "cost": "fewest device hours: step time x devices in use",
}
"""Values of `--objective`."""

WON = {"time": "fastest plan that fits", "memory": "needs the least memory", "cost": "costs the least"}
"""Reason of the winner, by objective."""

Scored = tuple[Plan, Estimate]

LEAST_SAVING = 0.2
"""Share of the step that a plan must save to be preferred if its replicas do not wait for each other: it needs more
steps to the same loss. How many more is not known here. A smaller share chooses such plans for less."""


TIE = 0.02
"""Relative difference of two predicted times, or costs, up to which plans are ties and the simplest is proposed.

What a price is off by is mostly common to all plans of one model on one cluster, so a tie is much narrower than the
stated error. Among pairs of published runs that differ in their layout alone, the faster one is predicted little better
than by a coin where predictions differ by less, and the more often the more they differ (the table in
docs/planning.md). A larger value proposes simpler plans that are really slower; a smaller one, complicated plans for a
gain that is not there."""


UNMEASURED_TIE = 0.05
"""The same where rates are those of a data sheet, whose error is twice that of measured ones: what zero=3 saves of an
update, or costs in copies, is then an estimate of a few percent."""


def tie_width(error: float) -> float:
    """Relative difference up to which plans are ties, for estimates with a stated error."""
    return UNMEASURED_TIE if error >= UNMEASURED_ERROR else TIE


def best_first(objective: str) -> Callable[[Scored], tuple[float, ...]]:
    """Sort key of plans that fit; of equals, the simpler one comes first."""
    if objective not in OBJECTIVES:
        raise InputError(
            f"--objective {objective}", rule=f"one of {', '.join(OBJECTIVES)}", fix=nearest(objective, OBJECTIVES)
        )
    return lambda scored: (
        *(handicap(scored[0]) * value(*scored, o) for o in (objective, "time")),
        scored[0].ranks,
        *complexity(scored[0]),
    )


def handicap(plan: Plan) -> float:
    """The factor on the values of an approximate plan when plans are compared: see LEAST_SAVING."""
    if not sync_caveat(plan):
        return 1.0
    return 1 / (1 - LEAST_SAVING)


def counted_share(plan: Plan) -> float:
    """Share of a batch whose gradients count: not those of backup workers."""
    return 1 - plan.backup / plan.dp


def value(plan: Plan, e: Estimate, objective: str) -> float:
    """The quantity that an objective minimises: seconds for a batch of samples that count, bytes or device seconds."""
    if objective == "memory":
        return e.memory_bytes
    return e.step_seconds / counted_share(plan) * (plan.ranks if objective == "cost" else 1)


def complexity(plan: Plan) -> tuple[int, ...]:
    """Split axes, offload and chunks, sharding, recomputation, micro-batches, split parts, keys: fewer is simpler."""
    axes = (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.tile[0] * plan.tile[1])
    return (
        sum(n > 1 for n in axes),
        plan.offload != "none",
        plan.chunk,
        plan.zero,
        CHOICES["recompute"].index(plan.recompute),
        plan.micro,
        plan.ranks // plan.dp,
        len(plan.table()),
        plan.shards,
        plan.server_processes,
    )


def is_tie(least: float, other: float, objective: str, width: float = TIE) -> bool:
    """Whether a value ties with the least one. Memory is counted, not priced, and has no ties."""
    return objective != "memory" and other <= (1 + width) * least


def simplest_first(plans: Sequence[tuple[Plan, float]], objective: str = "time", width: float = TIE) -> list[int]:
    """Indices of plans with their values, best first: the simplest that ties with the best, then all in their order.

    It uses as many devices as the best, or for `time` more: what one knows of a tie does not justify idle devices. An
    approximate plan neither wins a tie nor loses one.
    """
    if not plans:
        return []
    best, least = plans[0]
    order = list(range(len(plans)))

    def may_replace(plan: Plan) -> bool:
        enough = plan.ranks >= best.ranks if objective == "time" else plan.ranks == best.ranks
        return enough and handicap(plan) == 1.0

    if handicap(best) != 1.0:
        return order
    ties = [i for i in order if is_tie(least, plans[i][1], objective, width) and may_replace(plans[i][0])]
    chosen = min(ties, key=lambda i: (*complexity(plans[i][0]), i), default=0)
    return [chosen, *(i for i in order if i != chosen)]


class PricedStep(Protocol):
    """Time and memory of one step."""

    @property
    def step_seconds(self) -> float: ...

    @property
    def memory_bytes(self) -> float: ...

    @property
    def fits(self) -> bool: ...

    @property
    def in_reserve(self) -> bool: ...


PricedT = TypeVar("PricedT", bound=PricedStep)


def pareto(scored: Sequence[tuple[Plan, PricedT]]) -> list[tuple[Plan, PricedT]]:
    """Plans that fit and that no other plan beats in both time and memory, fastest first.

    Those that fit only into the reserve are left out, unless no other fits.
    """
    front: list[tuple[Plan, PricedT]] = []
    fitting = [s for s in scored if s[1].fits]
    fitting = [s for s in fitting if not s[1].in_reserve] or fitting
    for plan, e in sorted(fitting, key=lambda s: (s[1].step_seconds, s[1].memory_bytes)):
        if not front or e.memory_bytes < front[-1][1].memory_bytes:
            front.append((plan, e))
    return front
