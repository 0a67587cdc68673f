"""A training before it starts: the traced model, the machines, the plan, and the predicted step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError, PlanError, TraceError
from .callbacks import Notify, Progress, ignore_progress, log_note
from .corrections import load_machines, without_corrections
from .external_ranks import current_ranks
from .inputs import load_plan, profile_in_precision

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.job import Job
    from ..costs import Estimate
    from ..models import Profile
    from ..planner import Answer
    from ..plans import Plan
    from .inputs import ClusterInput, PlanInput

AUTO = "auto"
"""In place of a plan: search for the fastest that fits and that the engine can run."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A planned training and its prediction."""

    profile: Profile
    cluster: Cluster
    file: Path | None
    """The cluster file, if it is of a measured machine: corrections are kept next to it."""
    answer: Answer | None
    """The search; none where the plan was given and no comparison was asked for."""
    plan: Plan
    estimate: Estimate
    skipped: str = ""
    """Which faster plans the engine cannot run, and why."""

    def speed_of(self, event: Mapping[str, Any]) -> float | None:
        """The machine's speed now over its measured one, from a rank's report: of all of it, or of a GPU's host."""
        from ..costs.what_if import speed_at_host_slowdown

        if "pace" not in event:
            return event.get("speed")
        return speed_at_host_slowdown(event["pace"], self.profile, self.plan, without_corrections(self.cluster))


def forecast(
    job: Job,
    plan: PlanInput,
    ranks: int | None,
    cluster: ClusterInput,
    *,
    corrections: bool,
    compare: bool = False,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> Forecast:
    """Trace the job and price the plan; search for one if `plan` is `auto`, or for others if `compare` asks for it."""
    from ..costs import estimate
    from ..costs.input_pipeline import with_input
    from ..datasets.load_time import measure_load_time
    from ..planner import default_precision, search
    from ..plans import check
    from ..tracing import trace

    given = None if plan == AUTO else load_plan(plan)
    if given is not None:
        check_ranks(given, ranks)
        check(given)
        check_job(job, given)  # before this machine is measured
    profile = trace(job)
    machines = load_machines(
        cluster, given.ranks if given else ranks, corrections=corrections, notify=notify, progress=progress
    )
    precision = given.precision if given else default_precision(machines.cluster)
    profile = profile_in_precision(job, profile, precision, machines.cluster.device.kind)
    answer, skipped = None, ""
    if given is None or compare:
        answer, _ = search(profile, machines.cluster, precision=precision)
    if given is None:
        assert answer is not None
        joined = current_ranks()
        given, skipped = best_runnable(job, answer, processes=joined.size if joined else None)
        check(given)
    predicted = estimate(profile, given, machines.cluster)
    if (pipeline := measure_load_time(job, notify)) is not None:
        predicted = with_input(predicted, given, pipeline)
    if skipped:
        predicted = dataclasses.replace(predicted, notes=(*predicted.notes, skipped))
    return Forecast(profile, machines.cluster, machines.file, answer, given, predicted, skipped)


def check_ranks(plan: Plan, ranks: int | None) -> None:
    """Refuse a plan for another number of ranks than there are."""
    if ranks is not None and ranks < 1:
        raise InputError(f"ranks={ranks}", rule="at least one rank")
    if ranks is not None and ranks != plan.ranks:
        raise PlanError(
            f"the plan {plan} is for {plan.ranks} rank{'s' if plan.ranks > 1 else ''}, not {ranks}",
            rule=f"{plan.equation} != {ranks} ranks",
            fix=f"--ranks {plan.ranks}, or dp={ranks}",
        )


def check_job(job: Job, plan: Plan) -> None:
    """Raise what the engine would raise for a job under a plan that splits or captures it; needs no ranks."""
    if plan.graph:
        from ..datasets.sources import open_data
        from ..runtime.core.step_graph import check_batches

        check_batches(job, plan, open_data(job).length)
    if plan.splits_model:
        from ..runtime.parallel.trial_split import try_split

        try_split(job, plan)


def best_runnable(job: Job, answer: Answer, *, processes: int | None = None) -> tuple[Plan, str]:
    """The fastest plan that fits and that the engine can run; and which faster one was skipped, with the reason.

    `processes`: exactly that many, where the ranks have been started already.
    """
    refused: PlanError | TraceError | None = None
    skipped = ""
    for candidate in answer.candidates:
        plan = candidate.plan
        if processes not in (None, plan.processes):
            continue
        if not candidate.fits or (plan.splits_model and isinstance(refused, TraceError)):
            continue  # a model that cannot be captured cannot be split by any plan
        try:
            check_job(job, plan)
            return plan, skipped
        except (PlanError, TraceError) as e:
            kind = "no plan that splits the model was chosen" if isinstance(e, TraceError) else f"{plan} was not chosen"
            refused, skipped = e, skipped or f"{kind}: {e.what}"
    if refused is None and processes is not None:
        raise PlanError(
            f"no plan for exactly {processes} ranks fits", rule="every rank of the launcher takes part", fix="--plan"
        )
    assert refused is not None, "a search returns a plan that fits, or raises"
    raise refused
