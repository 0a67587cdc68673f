"""What `drumline train` does about plans that split the model: tried before they run, and looked at afterwards."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..core.errors import PlanError, TraceError

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.job import Job
    from ..models import Profile
    from ..planner import Answer
    from ..plans import Plan
    from ..reports.division import Division


def can_split(job: Job, plan: Plan) -> None:
    """Refuse what the engine would refuse, where a plan splits the model: here it takes no ranks and no machine."""
    if plan.splits_model:
        from ..runtime.parallel.rehearsal import rehearse

        rehearse(job, plan)


def best(job: Job, answer: Answer) -> tuple[Plan, str]:
    """The fastest plan that fits and that the engine can split this model by; and what was passed over, if anything."""
    from ..plans import Plan

    passed: PlanError | TraceError | None = None
    why = ""
    for candidate in answer.candidates:
        plan = Plan.parse(candidate.plan)
        if not candidate.fits or (plan.splits_model and isinstance(passed, TraceError)):
            continue  # what cannot be captured cannot be split by any plan
        try:
            can_split(job, plan)
            return plan, why
        except (PlanError, TraceError) as e:
            kind = "no plan that splits the model was chosen" if isinstance(e, TraceError) else f"{plan} was not chosen"
            passed, why = e, why or f"{kind}: {e.what}"
    assert passed is not None, "a search gives a plan that fits, or raises"
    raise passed


def carried_out(profile: Profile, plan: Plan, machines: Cluster, results: list[dict[str, Any]]) -> Division | None:
    """What the first rank says of a plan that splits the model, and of a pipeline the bubbles."""
    division: Division | None = results[0]["division"]
    if division is None or plan.pp == 1:
        return division
    from ..costs import Steps
    from ..runtime.pipeline.clock import bubble_of_order, measured_bubble
    from ..schedules import pipeline_order

    lanes = [r["lanes"] for r in results]
    order = pipeline_order(plan.schedule, plan.pp, plan.micro, plan.virtual)
    predicted = Steps(profile, machines, plan.precision).divided.piped(plan).bubble
    found = {"predicted": predicted, "measured": measured_bubble(lanes), "order": bubble_of_order(order, lanes)}
    return dataclasses.replace(division, bubble={k: v for k, v in found.items() if v is not None})
