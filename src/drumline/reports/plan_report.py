"""The `PlanReport` value: a search and all that its page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..clusters.spec import Cluster
from ..costs.estimate import Estimate
from ..models.profile import Profile
from ..planner.answer import Answer
from ..planner.objectives import pareto
from ..planner.reserve import Reserve
from ..planner.scaling_curve import ScalingPoint, scaling_curve
from ..planner.strategy_map import StrategyMap, candidate_maps, strategy_maps
from ..plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """An answer; where they are known, the question that it answers and what follows from both."""

    answer: Answer
    profile: Profile | None = None
    cluster: Cluster | None = None
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """By plan, with that of `given`."""
    given: Plan | None = None
    """The user's own plan, shown next to the best."""
    maps: tuple[StrategyMap, ...] = ()
    scaling: tuple[ScalingPoint, ...] = ()
    """The best plan for each number of devices."""

    @property
    def best(self) -> Plan:
        """The winner."""
        return self.answer.best.plan

    @property
    def estimate(self) -> Estimate | None:
        """The prediction for the winner."""
        return self.estimates.get(str(self.best))

    @property
    def compared(self) -> list[tuple[str, Estimate]]:
        """The predictions for the winner and for the user's own plan, as far as they are known."""
        plans = {"Best": self.best} | ({"Yours": self.given} if self.given else {})
        return [(name, self.estimates[str(p)]) for name, p in plans.items() if str(p) in self.estimates]

    @property
    def front(self) -> list[str]:
        """The plans that no other beats in both time and memory, fastest first."""
        return [str(plan) for plan, _ in pareto([(c.plan, c) for c in self.answer.candidates])]

    @classmethod
    def of_answer(cls, answer: Answer) -> PlanReport:
        """Report of an answer alone: nothing about the model, the machines and the parts of a step."""
        tight = answer.best.in_reserve
        plans = [(c.plan, c.step_seconds, c.memory_bytes, c.fits and c.in_reserve == tight) for c in answer.candidates]
        return cls(answer=answer, maps=tuple(candidate_maps(plans)))

    @classmethod
    def of_search(
        cls,
        answer: Answer,
        estimates: Mapping[str, Estimate],
        profile: Profile,
        cluster: Cluster,
        *,
        precision: str | None = None,
        given: Plan | None = None,
        reserve: Reserve = None,
    ) -> PlanReport:
        """All of it. The map of the whole space and the scaling curve are computed here, which takes seconds."""
        ranked = [(c.plan, estimates[str(c.plan)]) for c in answer.candidates]
        best = answer.best.plan
        return cls(
            answer=answer,
            profile=profile,
            cluster=cluster,
            estimates=estimates,
            given=given,
            maps=tuple(strategy_maps(profile, cluster, best.precision, ranked)),
            scaling=tuple(scaling_curve(profile, cluster, precision=precision, reserve=reserve))
            if cluster.devices > 1
            else (),
        )
