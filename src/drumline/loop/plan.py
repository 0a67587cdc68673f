"""`dl.plan`: the fastest plan that fits, with every other candidate and the reason it lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InputError, PlanError
from .callbacks import Notify, Progress, ignore_progress, log_note
from .corrections import Machines, load_machines
from .external_ranks import joins_ranks_to_measure
from .finalists import FinalistDryRuns
from .inputs import is_job, load_job, load_plan, load_profile, profile_in_precision, with_step_times
from .main_guard import refuse_while_loading

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..costs import Estimate
    from ..costs.input_pipeline import InputPipeline
    from ..models import Profile
    from ..planner import Answer
    from ..planner.reserve import Reserve
    from ..plans import Plan
    from .inputs import ClusterInput, ModelInput, PlanInput, SlowRanks

LARGEST_BATCH = 10_000_000


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """A model to plan for some machines."""

    target: ModelInput
    profile: Profile
    own_batch: int
    """The model's own batch size, before `batch` replaced it."""
    cluster: Cluster
    fleet: Cluster
    """With as many devices as there may be."""
    precision: str | None = None
    objective: str = "time"
    given: Plan | None = None
    """The user's own plan, priced next to the best."""
    dry_runs: FinalistDryRuns | None = None
    allow_stale: bool = False
    """Whether replicas need not wait for each other."""
    reserve: Reserve = None
    """Memory of each device that stays free."""
    pipeline: InputPipeline | None = None
    """The measured loading of the job's samples."""


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """A question, its answer, and the estimates of all candidates by plan."""

    question: PlanQuestion
    answer: Answer
    estimates: dict[str, Estimate]

    @property
    def best(self) -> Plan:
        """The winner."""
        return self.answer.best.plan

    @property
    def chosen(self) -> Plan:
        """The user's own plan if there is one, else the winner: what further questions are about."""
        return self.question.given or self.best

    @property
    def ranked(self) -> list[tuple[Plan, Estimate]]:
        """All candidates, best first."""
        return [(c.plan, self.estimates[str(c.plan)]) for c in self.answer.candidates]


@joins_ranks_to_measure
def plan(
    job: ModelInput,
    cluster: ClusterInput = None,
    *,
    devices: int | None = None,
    memory: str | float | None = None,
    changes: Sequence[str] = (),
    batch: int | None = None,
    precision: str | None = None,
    objective: str = "time",
    reserve: Reserve = None,
    sequence: int | None = None,
    corrections: bool = True,
    dry_run: bool = False,
    slow: SlowRanks | None = None,
    jitter: float | None = None,
    allow_stale: bool = False,
    page: str | Path | None = None,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> Answer:
    """Find the fastest plan that fits. `answer.best.plan` is the plan, `answer.candidates` all of them, best first.

    `job` is a job, a profile, or a zoo name such as `gpt:175b`; `cluster` a cluster, a file, or a catalogue name
    (default: this machine). `devices` and `memory` limit the cluster, `changes` alter it
    (`node.link.bandwidth=400GB/s`). `objective` is `time`, `memory` or `cost`. `reserve` is the memory of a device that
    stays free: a share (`10%`), a size (`8GB`), 0 for none; by default 10% of a GPU and nothing of a CPU. `sequence` is
    the number of tokens per sample of a zoo model. `dry_run` runs a step of each finalist
    on fake tensors and drops those that fail. `slow` (`{3: 4.0}`: rank 3 takes four times as long) and `jitter`
    (standard deviation of step times over their mean) describe ranks that differ; `allow_stale` also offers plans whose
    replicas do not wait for each other, which are approximate. `page` is a file, or a folder, for an HTML page about
    the answer. Raises `DoesNotFit` if no plan fits. Without a cluster, under torchrun, srun or mpiexec,
    every rank calls this: they measure together, and get the same answer for as many devices as there are ranks.
    """
    question = ask(
        job,
        cluster,
        devices=devices,
        memory=memory,
        changes=changes,
        batch=batch,
        precision=precision,
        objective=objective,
        reserve=reserve,
        sequence=sequence,
        corrections=corrections,
        dry_run=dry_run,
        slow=slow,
        jitter=jitter,
        allow_stale=allow_stale,
        notify=notify,
        progress=progress,
    )
    search = search_plans(question)
    if page is not None:
        from .prediction_pages import write_search

        write_search(search, page)
    return search.answer


def ask(
    job: ModelInput,
    cluster: ClusterInput = None,
    *,
    given: PlanInput | None = None,
    devices: int | None = None,
    memory: str | float | None = None,
    changes: Sequence[str] = (),
    batch: int | None = None,
    precision: str | None = None,
    objective: str = "time",
    reserve: Reserve = None,
    sequence: int | None = None,
    corrections: bool = True,
    dry_run: bool = False,
    slow: SlowRanks | None = None,
    jitter: float | None = None,
    allow_stale: bool = False,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> PlanQuestion:
    """Check the arguments, trace the model and load the machines: everything before the search."""
    refuse_while_loading()
    own = load_plan(given) if given is not None else None

    def load() -> Machines:
        machines = load_machines(
            cluster,
            devices,
            corrections=corrections,
            memory=memory,
            changes=changes,
            notify=notify,
            progress=progress,
        )
        here = with_step_times(machines.cluster, slow, jitter)
        return dataclasses.replace(machines, cluster=here)

    # this machine may have to be measured, which takes a minute: bad options and a bad job should fail before that
    machines = load() if cluster is not None else None
    check_plan_options(batch=batch, precision=precision, objective=objective, reserve=reserve)
    wanted = _precision(own, precision, machines.cluster) if machines else ""
    kind = machines.cluster.device.kind if machines else "cpu"
    notes: list[str] = []
    pipeline = _input_of(job, batch, notes.append)
    profile = load_profile(job, precision=wanted, device=kind, sequence=sequence)
    for note in notes:  # of samples that cannot be loaded, unless the trace has refused the job for them
        notify(note)
    own_batch = profile.batch_size
    profile = profile if batch is None else dataclasses.replace(profile, batch_size=batch)
    machines = machines or load()
    dry_runs = FinalistDryRuns(job, batch, machines.cluster.device.kind) if dry_run else None
    question = PlanQuestion(
        target=job,
        profile=profile,
        own_batch=own_batch,
        cluster=machines.cluster,
        fleet=machines.fleet,
        precision=precision,
        objective=objective,
        dry_runs=dry_runs,
        allow_stale=allow_stale,
        reserve=reserve,
        pipeline=pipeline,
    )
    if own is not None:
        own = check_given(own, question)
        question = dataclasses.replace(question, given=own, precision=own.precision)
    chosen = _precision(own, question.precision, machines.cluster)
    profile = profile_in_precision(job, profile, chosen, machines.cluster.device.kind)
    return dataclasses.replace(question, profile=profile)


def search_plans(question: PlanQuestion) -> PlanSearch:
    """Score every candidate, and price the user's own plan next to them."""
    from ..costs.input_pipeline import with_input
    from ..planner import price, search

    q = question
    answer, estimates = search(
        q.profile,
        q.cluster,
        precision=q.precision,
        fleet=q.fleet,
        objective=q.objective,
        break_even=True,
        dry_run=q.dry_runs,
        allow_stale=q.allow_stale,
        reserve=q.reserve,
    )
    if q.given is not None:
        estimates[str(q.given)] = price(q.profile, q.cluster, q.given)
    made = PlanSearch(q, answer, estimates)
    if q.pipeline is not None:
        for chosen in filter(None, (made.best, q.given)):
            estimates[str(chosen)] = with_input(estimates[str(chosen)], chosen, q.pipeline)
    return made


def _input_of(job: ModelInput, batch: int | None, notify: Notify) -> InputPipeline | None:
    """How long a job's samples take to load here, for batches of that size, or of the job's own."""
    if not is_job(job):
        return None
    from ..datasets.load_time import measure_load_time

    pipeline = measure_load_time(load_job(job), notify)
    if pipeline is None or batch is None:
        return pipeline
    return dataclasses.replace(pipeline, batch_size=batch)


def check_plan_options(*, batch: int | None, precision: str | None, objective: str, reserve: Reserve = None) -> None:
    """Refuse bad values before anything is traced or measured."""
    from ..planner.objectives import best_first
    from ..planner.reserve import check_reserve
    from ..plans.plan import CHOICES

    best_first(objective)  # refuses unknown objectives
    check_reserve(reserve)
    if batch is not None and not 1 <= batch <= LARGEST_BATCH:
        raise InputError(f"batch={batch}", rule=f"from 1 to {LARGEST_BATCH:,} samples")
    if precision is not None and precision not in CHOICES["precision"]:
        raise InputError(f"precision={precision}", rule=f"one of {', '.join(CHOICES['precision'])}")


def check_given(plan: Plan, question: PlanQuestion) -> Plan:
    """The user's own plan in the precision that was asked for; refused if the engine or the machines cannot run it."""
    from ..costs.runs_on import check_runs_on
    from ..plans import check

    have, batch = question.cluster.devices, question.profile.batch_size
    if question.precision is not None and "precision" not in plan.table():
        plan = dataclasses.replace(plan, precision=question.precision)
    check(plan)
    check_runs_on(plan, question.cluster)
    if plan.ranks > have:
        raise PlanError(
            f"{plan} needs {plan.ranks} devices",
            rule=f"{plan.equation} = {plan.ranks} > {have} devices",
            fix=f"--devices {plan.ranks}, or a smaller plan",
        )
    least = plan.slices * plan.micro
    if least > batch:
        replicas = f"dp({plan.dp}) x " if plan.slices > 1 else ""
        raise PlanError(
            f"{plan} for batches of {batch}",
            rule=f"every replica has a sample in every micro-batch: {replicas}micro({plan.micro}) = {least} > {batch} "
            "samples",
            fix=f"--batch {least}, or fewer replicas or micro-batches",
        )
    return plan


def _precision(given: Plan | None, precision: str | None, cluster: Cluster) -> str:
    """The precision of the user's own plan, the one asked for, or the default of these machines."""
    from ..planner import default_precision

    if given is not None and (precision is None or "precision" in given.table()):
        return given.precision
    return precision or default_precision(cluster)
