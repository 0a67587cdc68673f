"""Replays a plan under a distribution of step times (`Cluster.step_times`), whether its replicas wait or not."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from ..clusters import Cluster, StepTimeDistribution
from ..core.timeline import Timeline
from ..costs.asynchronous import price_workers
from ..costs.estimate import Estimate
from ..costs.model import CostModel
from ..costs.operator_model import OperatorCostModel
from ..costs.scaled_step import scaled_step
from ..costs.step import Step
from ..costs.straggling import slowed_step, slowest_of_stages
from ..costs.worker_times import WorkerTimes
from ..models.profile import Profile
from ..plans import Plan
from ..schedules.update_rules import update_rule
from .peer_replay import replay_peers
from .server_replay import ServerReplay
from .step import StepLayout, lay_out_to, simulate_step
from .straggling_step import straggling_timeline
from .worker_replay import ReplayLog, WorkerReplay, stretched

LEAST_STEPS, MOST_STEPS = 64, 4096
"""Steps that are replayed, by default: enough for every replica to meet all others, bounded for many replicas."""
MOST_UPDATES = 20_000
SYNCHRONOUS_STEPS, MOST_DRAWS = 1024, 2_000_000
"""Steps of replicas that meet in every step, and the factors that all ranks draw in them, at most."""
MOST_ACTIONS = 400_000
"""Layers or pipeline actions that are timed in all of these steps, at most."""
DRAWN_STEPS = 8
"""Steps of `local:k` that are drawn: up to the last average."""


def replay_workers(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    *,
    steps: int | None = None,
    speed: float = 1.0,
    model: CostModel | None = None,
) -> WorkerReplay:
    """Throughput, waiting and staleness of a plan, replayed for some steps. The same seed gives the same answer.

    `model` prices the work of a rank, for a cluster whose ranks are even; by default it is the operator model.
    """
    model = model or OperatorCostModel(profile, _even(cluster), plan.precision)
    if plan.sync == "allreduce":
        return replay_together(profile, plan, cluster, model.estimate(plan), steps=steps, speed=speed)[0]
    count = steps or _steps(plan, cluster)
    times = model.worker_times(plan)
    if plan.has_coordinator:
        return _with_coordinator(profile, plan, cluster, times, count, speed)
    log = replay_peers(plan, times, cluster.step_times, cluster.node.devices, steps=count)
    return _peers(profile, plan, log, speed)


def plan_timeline(profile: Profile, plan: Plan, cluster: Cluster, *, speed: float = 1.0) -> Timeline:
    """The predicted timeline of a step of any plan, under the cluster's distribution of step times."""
    if plan.sync == "allreduce" and not cluster.step_times:
        return simulate_step(profile, plan, cluster, speed=speed)
    return replay_workers(profile, plan, cluster, speed=speed).timeline


def _even(cluster: Cluster) -> Cluster:
    return replace(cluster, step_times=StepTimeDistribution())


def _steps(plan: Plan, cluster: Cluster) -> int:
    """More steps where they differ from each other."""
    period = max(plan.sync_steps, plan.across, 1)
    wanted = (8 if cluster.step_times.jitter else 2) * max(LEAST_STEPS, 8 * period)
    return period * -(-max(4 * period, min(wanted, MOST_STEPS, MOST_UPDATES // plan.dp)) // period)


def _with_coordinator(
    profile: Profile, plan: Plan, cluster: Cluster, times: WorkerTimes, steps: int, speed: float
) -> WorkerReplay:
    """Workers and servers, by the rule that the servers run."""
    whole = plan.slices == 1 and plan.sync_mode in ("async", "hogwild")
    updates = steps * plan.dp if whole else steps
    stale = plan.sync_steps if plan.sync_mode == "stale" else 0
    # at the end workers run out of tasks: those updates are beyond the ones that count
    rest = plan.dp if whole else stale
    rule = update_rule(plan.sync_mode, plan.dp, updates + rest, stale=stale, backup=plan.backup, damping=plan.damping)
    replay = ServerReplay(rule, times, cluster.step_times, shared=plan.sync == "hogwild")
    # out of phase, as workers are that nothing holds together
    stagger = price_workers(plan, times, cluster).step_seconds if whole else 0.0
    log = replay.run(stagger)
    del log.updates[updates:], log.staleness[updates:]
    first, last = log.counted()
    start, end = log.updates[first], log.updates[last]
    seconds, length = end - start, replay.loop.now
    gradients = sum(len(x) for x in log.staleness[first + 1 : last + 1])
    used = {"receive": replay.pushes.busy, "update": replay.updating, "send": replay.pulls.busy}
    return WorkerReplay(
        updates=last - first,
        step_seconds=seconds / max(1, last - first) / speed,
        samples_per_second=speed * gradients * profile.batch_size / plan.slices / seconds if seconds else 0.0,
        waiting=log.waiting(start, end),
        staleness=log.histogram(first, last),
        dropped=rule.counts.dropped,
        server_use={} if plan.sync == "hogwild" else {k: v / length for k, v in used.items()},
        timeline=_window(log, last, plan.dp if whole else 1, speed),
    )


def _peers(profile: Profile, plan: Plan, log: ReplayLog, speed: float) -> WorkerReplay:
    """Replicas that average."""
    first, last = log.counted()
    period = max(plan.sync_steps, plan.across, 1)
    last -= (last - first) % period  # whole periods
    start, end = log.updates[first], log.updates[last]
    step = (end - start) / max(1, last - first) / speed
    return WorkerReplay(
        updates=last - first,
        step_seconds=step,
        samples_per_second=profile.batch_size / step if step else 0.0,
        waiting=log.waiting(start, end),
        timeline=_window(log, len(log.updates) - 1, min(max(plan.sync_steps, 1), DRAWN_STEPS), speed),
    )


def _window(log: ReplayLog, last: int, updates: int, speed: float) -> Timeline:
    """The last updates that count, as a timeline."""
    start = log.updates[max(0, last - updates)]
    timeline = log.window(start, log.updates[last])
    return stretched(timeline, speed)


def replay_together(
    profile: Profile, plan: Plan, cluster: Cluster, even: Estimate, *, steps: int | None = None, speed: float = 1.0
) -> tuple[WorkerReplay, StepLayout]:
    """Replicas that meet in every step, and the layout of a step: each stage is as fast as its slowest rank.

    `even` is the estimate for ranks that are all alike. Of many steps, the one nearest to their mean is drawn, with the
    length of the mean.
    """
    step = scaled_step(OperatorCostModel(profile, cluster, plan.precision).step(plan), even)
    steps = steps or _synchronous_steps(step, cluster.step_times)
    rest = even.step_seconds - step.seconds  # closed forms of the estimate that differ from those of the parts
    drawn = list(islice(zip(*cluster.step_times.all_draws(plan.ranks), strict=True), steps))
    seconds, waited = [], [0.0] * plan.ranks
    compute = [step.compute(stage) for stage in range(plan.pp)]
    for factors in drawn:
        slowest = slowest_of_stages(factors, plan.pp)
        slowed = slowed_step(step, slowest)
        seconds.append((rest + slowed.seconds) / speed)
        idle = [slowed.seconds - slowed.busy(stage) for stage in range(plan.pp)]
        each = plan.ranks // plan.pp
        for rank, factor in enumerate(factors):
            stage = rank // each
            waited[rank] += (idle[stage] + (slowest[stage] - factor) * compute[stage]) / speed
    mean = sum(seconds) / steps
    shown = drawn[min(range(steps), key=lambda i: abs(seconds[i] - mean))]
    layout = lay_out_to(slowed_step(step, slowest_of_stages(shown, plan.pp)), speed * mean)
    replay = WorkerReplay(
        updates=steps,
        step_seconds=mean,
        samples_per_second=profile.batch_size / mean,
        waiting=tuple(max(0.0, x) / (steps * mean) for x in waited),
        staleness={0: steps * plan.dp},
        timeline=straggling_timeline(layout, shown, speed=speed),
    )
    return replay, layout


def _synchronous_steps(step: Step, spread: StepTimeDistribution) -> int:
    """Steps to replay: one if all are the same, else as many as are quick."""
    if not spread.jitter:
        return 1
    order = step.pipeline.order if step.pipeline else None
    actions = 2 * order.stages * order.micros if order else len(step.layers)
    return max(1, min(SYNCHRONOUS_STEPS, MOST_DRAWS // step.plan.ranks, MOST_ACTIONS // actions))
