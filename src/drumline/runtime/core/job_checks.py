"""Checks of what a job asks for under a plan, besides the needs of its model."""

from __future__ import annotations

from typing import Any

from ...core.errors import PlanError
from ...core.job import Job
from ...plans import Plan
from ..state.optimizer import waits_for_metric


def check_job(job: Job, plan: Plan, schedule: Any) -> None:
    """Refuse, by name, what needs ranks that meet after every step, or one place that has the weights."""
    wants = {
        f"ema={job.ema}": job.ema is not None,
        f"evaluate_every={job.evaluate_every}": bool(job.evaluate_every),
        "callbacks": job.callbacks is not None,
        "ReduceLROnPlateau": waits_for_metric(schedule),
    }
    asked = [name for name, wanted in wants.items() if wanted]
    if plan.has_coordinator and asked:
        raise PlanError(
            f"a job with {' and '.join(asked)} under sync={plan.sync}",
            where=f"plan {plan}",
            rule="workers neither meet after a step nor have the weights, which parameter servers update",
            fix="sync=allreduce or local:k",
        )
    if plan.keeps_batches_in_flight and job.callbacks is not None and not job.evaluate_every:
        raise PlanError(
            f"a job with callbacks under schedule={plan.schedule}",
            where=f"plan {plan}",
            rule="its ranks are at different batches, and agree to stop only where they meet: at an evaluation",
            fix="evaluate_every=n in the job, or schedule=1f1b",
        )
