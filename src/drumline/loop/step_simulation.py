"""Steps of a job under a plan: replayed once, over days with failures, or on several numbers of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import InputError, PlanError
from ..core.units import format_percent, format_seconds, parse_seconds
from ..theory.roofline import compute_type
from .callbacks import Notify, Progress, ignore_progress, log_note
from .checkpoints import parse_failures
from .corrections import load_machines
from .inputs import load_plan, load_profile, profile_in_precision, with_step_times
from .simulate import Simulation

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.timeline import Timeline
    from ..costs import Estimate
    from ..models import Profile
    from ..plans import Plan
    from ..simulator.failures import FailureReplay
    from ..simulator.step import StepLayout
    from ..simulator.worker_replay import WorkerReplay
    from ..theory.checkpoint_interval import FailureRate
    from .inputs import ClusterInput, ModelInput, PlanInput, SlowRanks

LONGEST_DAYS = 3650.0
SAME = 1e-9
"""Relative difference up to which two step times count as equal."""
CONTENTION = "link contention"
"""The part of a simulated step that no estimate has."""


@dataclass(frozen=True, slots=True)
class FailureOptions:
    """Failures of devices over some days."""

    mtbf: str | float
    """Mean time between failures: `50000h` of one device, `12h/run` of all, or seconds of one device."""
    restart: str | float = "5min"
    """From a failure until training goes on: detection, start of the ranks, loading the checkpoint."""
    days: float = 30.0

    @classmethod
    def of(cls, mtbf: str | float | None, restart: str | float | None, days: float | None) -> FailureOptions | None:
        """None without a time between failures, and then the others must not be given either."""
        given = {"--restart": restart, "--days": days}
        name = next((name for name, value in given.items() if value is not None), None)
        if mtbf is None and name:
            raise InputError(f"{name} without --mtbf", rule="it is for a replay with failures", fix="--mtbf 50000h")
        if mtbf is None:
            return None
        return cls(mtbf, "5min" if restart is None else restart, 30.0 if days is None else days)

    def rates(self) -> tuple[FailureRate, float]:
        """(how often something fails, seconds of a restart); refuses bad values."""
        if not 0 < self.days <= LONGEST_DAYS:
            raise InputError(f"--days {self.days:g}", rule=f"more than 0, at most {LONGEST_DAYS:g}")
        rate = parse_failures(self.mtbf)
        try:
            restart = parse_seconds(self.restart)
        except ValueError as e:
            raise InputError(f"--restart {self.restart}", rule=str(e), fix="--restart 5min") from None
        if not 0 <= restart < float("inf"):
            raise InputError(f"--restart {self.restart}", rule="no negative time", fix="--restart 5min")
        return rate, restart


@dataclass(frozen=True, slots=True)
class StepQuestion:
    """A plan for a model on machines: everything that a replay needs."""

    profile: Profile
    plan: Plan
    cluster: Cluster
    """With slow links, if there are any."""
    intact: Cluster
    """The same without slow links."""


def load_question(
    target: ModelInput,
    plan: PlanInput,
    cluster: ClusterInput,
    *,
    changes: Sequence[str] = (),
    batch: int | None = None,
    sequence: int | None = None,
    devices: int | None = None,
    slow: SlowRanks | None = None,
    jitter: float | None = None,
    slow_links: Sequence[str] = (),
    seed: int | None = None,
    corrections: bool = True,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> StepQuestion:
    """Check the options, load the machines of a plan, which must be enough for it, and trace the model."""
    from ..clusters.slow_links import SlowLink
    from ..costs.runs_on import check_runs_on
    from ..costs.what_if import with_changes
    from ..plans import check

    chosen, links = load_plan(plan), [SlowLink.parse(text) for text in slow_links]
    check(chosen)
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch}", rule="at least one sample")
    if devices not in (None, chosen.ranks):
        raise PlanError(
            f"{chosen} on {devices} devices",
            rule=f"the plan takes {chosen.ranks}: all of --devices",
            fix=f"--devices {chosen.ranks}, or --sweep {devices} for another number of replicas",
        )
    needed = chosen.ranks if cluster is not None else None
    machines = load_machines(
        cluster, needed, corrections=corrections, changes=changes, notify=notify, progress=progress
    ).cluster
    if chosen.ranks > machines.devices:
        raise InputError(
            f"{chosen} takes {chosen.ranks} ranks",
            rule=f"{machines.name} has {machines.devices} devices",
            fix=f"--cluster NAME, or a file from `drumline measure --ranks {chosen.ranks}`",
        )
    check_runs_on(chosen, machines)
    intact = with_step_times(machines, slow, jitter, seed)
    for link in links:
        link.check(intact, str(chosen), chosen.sync == "allreduce")
    slowed = intact
    for link in links:
        slowed = with_changes(slowed, [link.change(slowed)])
    profile = load_profile(target, batch=batch, sequence=sequence)
    profile = profile_in_precision(target, profile, chosen.precision, machines.device.kind)
    return StepQuestion(profile, chosen, slowed, intact)


def simulate_job(
    target: ModelInput,
    plan: PlanInput,
    cluster: ClusterInput,
    *,
    failures: FailureOptions | None = None,
    slow_links: Sequence[str] = (),
    seed: int | None = None,
    **options: object,
) -> Simulation:
    """One step of a job under a plan; with `failures`, days of them. Other options are those of `load_question`."""
    if failures is not None:
        failures.rates()
    question = load_question(target, plan, cluster, slow_links=slow_links, seed=seed, **options)  # type: ignore[arg-type]  # passed on as they came
    simulation = replay_question(question)
    if slow_links:
        simulation = _with_slow_links(simulation, question, slow_links)
    if failures is not None:
        replay = _failures(simulation, question, failures, question.cluster.step_times.seed)
        simulation = dataclasses.replace(simulation, failures=replay)
    return simulation


def replay_question(question: StepQuestion) -> Simulation:
    """The step with the seconds of the cost model that `plan` uses."""
    from ..costs import cost_model

    profile, plan, machines = question.profile, question.plan, question.cluster
    model = cost_model(profile, machines, plan.precision)
    predicted = model.estimate(plan)
    alike = plan.sync == "allreduce" and not machines.step_times
    simulation = _replay_alike(question, predicted) if alike else _replay_different(question, predicted)
    return dataclasses.replace(_with_rates(simulation, question), planned_by=model.source)


def _replay_alike(question: StepQuestion, predicted: Estimate) -> Simulation:
    """Ranks of a stage that do the same, and meet in every step."""
    from ..costs import OperatorCostModel
    from ..simulator.link_contention import with_link_contention
    from ..simulator.step import lay_out

    operators = OperatorCostModel(question.profile, question.cluster, question.plan.precision)
    layout = with_link_contention(lay_out(operators.step(question.plan), predicted), operators, question.profile)
    simulation = _of_layout(question, predicted, layout, layout.timeline())
    if abs(layout.contention) <= SAME * predicted.step_seconds:
        return simulation
    return dataclasses.replace(
        simulation,
        parts={**predicted.parts, CONTENTION: layout.contention},
        notes=(_contention_note(predicted, layout.contention), *simulation.notes),
    )


def _contention_note(predicted: Estimate, seconds: float) -> str:
    """Why a step on shared links takes longer than `plan` says."""
    off = f"{100 * seconds / predicted.step_seconds:.2g}%"
    return (
        f"Link contention: messages of several kinds share links, which takes {format_seconds(seconds)} ({off}) more; "
        f"`plan` expects {format_seconds(predicted.step_seconds)}, as if each kind had the links to itself."
    )


def _of_layout(question: StepQuestion, predicted: Estimate, layout: StepLayout, timeline: Timeline) -> Simulation:
    """A step of ranks that meet: its timeline, and memory on the same clock."""
    from ..costs import OperatorCostModel
    from ..simulator.memory_curve import memory_curves

    profile, plan, machines = question.profile, question.plan, question.cluster
    operators = OperatorCostModel(profile, machines, plan.precision)
    pipeline = layout.step.pipeline
    overlap = pipeline is not None and pipeline.never_drains
    return Simulation(
        _title(question),
        timeline,
        predicted.parts,
        estimate=predicted,
        planned_seconds=predicted.step_seconds,
        memory=memory_curves(operators, profile, plan, machines, layout),
        latency_seconds=layout.stretch * pipeline.batch_seconds if pipeline and overlap else layout.seconds,
        notes=layout.notes,
    )


def _replay_different(question: StepQuestion, predicted: Estimate) -> Simulation:
    """Ranks that differ, or do not wait for each other: many steps by their rules, with the times of the cost model."""
    from ..clusters import StepTimeDistribution
    from ..costs import cost_model
    from ..simulator.workers import replay_together, replay_workers

    profile, plan, machines = question.profile, question.plan, question.cluster
    even = dataclasses.replace(machines, step_times=StepTimeDistribution())
    model = cost_model(profile, even, plan.precision)
    if plan.sync == "allreduce":
        workers, layout = replay_together(profile, plan, machines, model.estimate(plan))
        simulation = _of_layout(question, predicted, layout, workers.timeline)
    else:
        # worker times are not corrected: the replay is stretched by all of the correction
        speed = predicted.uncorrected_seconds / predicted.step_seconds if predicted.step_seconds else 1.0
        workers = replay_workers(profile, plan, machines, model=model, speed=speed)
        simulation = Simulation(
            _title(question),
            workers.timeline,
            predicted.parts,
            estimate=predicted,
            planned_seconds=predicted.step_seconds,
        )
    notes = simulation.notes
    if abs(workers.step_seconds - predicted.step_seconds) > SAME * predicted.step_seconds:
        notes = (_difference(question, workers, predicted), *notes)
    return dataclasses.replace(simulation, workers=workers, notes=notes)


def _title(question: StepQuestion) -> str:
    return f"{question.profile.name} with {question.plan} on {question.cluster.name}"


def _difference(question: StepQuestion, workers: WorkerReplay, predicted: Estimate) -> str:
    """Why the replay and `plan` give two numbers."""
    off = format_percent(workers.step_seconds / predicted.step_seconds - 1)
    replayed, planned = f"{format_seconds(workers.step_seconds)} ({off})", format_seconds(predicted.step_seconds)
    if question.plan.sync == "allreduce":
        seed = question.cluster.step_times.seed
        drawn = f"{workers.updates} steps" if workers.updates > 1 else "One step"
        takes = f"take {replayed} each" if workers.updates > 1 else f"takes {replayed}"
        return f"{drawn} drawn with seed {seed} {takes}; `plan` expects {planned}."
    return f"{workers.updates} replayed updates take {replayed} each; the closed form of `plan` gives {planned}."


def _with_rates(simulation: Simulation, question: StepQuestion) -> Simulation:
    """Add throughput, use of the devices and of the links."""
    from ..costs import OperatorCostModel
    from ..costs.link_traffic import link_use
    from ..costs.rank_model import tokens_of

    profile, plan, machines = question.profile, question.plan, question.cluster
    step = simulation.step_seconds
    samples = (
        simulation.workers.samples_per_second if simulation.workers else profile.batch_size / step if step else 0.0
    )
    peak = plan.ranks * machines.device.peak.get(compute_type(plan.precision), 0.0)
    work = profile.flops().at(profile.batch_size) / profile.batch_size * samples
    operators, meet = OperatorCostModel(profile, machines, plan.precision), plan.sync == "allreduce"
    return dataclasses.replace(
        simulation,
        samples_per_second=samples,
        tokens_per_second=samples * tokens_of(profile) or None,
        mfu=work / peak if peak and work else None,
        links=link_use(operators, profile, plan, machines, step) if meet else (),
    )


def _with_slow_links(simulation: Simulation, question: StepQuestion, links: Sequence[str]) -> Simulation:
    """Say what slow links cost."""
    before = replay_question(dataclasses.replace(question, cluster=question.intact)).step_seconds
    now = simulation.step_seconds
    note = (
        f"Slow link {', '.join(links)}: {format_seconds(now)} instead of {format_seconds(before)} "
        f"({format_percent(now / before - 1)})."
    )
    if any("@" in text for text in links):
        note += " All ranks wait for the node with the slow link."
    return dataclasses.replace(simulation, notes=(*simulation.notes, note))


def _failures(simulation: Simulation, question: StepQuestion, options: FailureOptions, seed: int) -> FailureReplay:
    """Days of such steps with a checkpoint every whole number of steps (Young/Daly) and restarts."""
    from ..planner.training import checkpoint_interval
    from ..simulator.failures import replay_failures

    assert simulation.estimate is not None
    rate, restart = options.rates()
    step = simulation.step_seconds
    estimate = dataclasses.replace(simulation.estimate, step_seconds=step)
    saves = checkpoint_interval(question.profile, question.plan, estimate, question.cluster, rate)
    replay = replay_failures(
        86400 * options.days,
        mtbf=saves.mtbf,
        interval=saves.every * step,
        stall=saves.stall,
        write=saves.write,
        restart=restart,
        seed=seed,
    )
    return dataclasses.replace(replay, storage=saves.bytes / saves.write if saves.write else 0.0)
