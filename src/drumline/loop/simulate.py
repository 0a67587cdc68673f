"""`dl.simulate`: a step under a plan, a collective, or a pipeline order, replayed in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InputError, nearest
from .callbacks import Notify, Progress, ignore_progress, log_note
from .corrections import without_corrections
from .inputs import load_cluster, load_plan, load_profile

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.timeline import Timeline
    from ..costs import Estimate
    from ..schedules import Pipeline, Schedule
    from .inputs import ClusterInput, ModelInput, PlanInput

LARGEST_COLLECTIVE = 4096
"""Ranks of a collective that is replayed message by message."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """A replay: its timeline, the step in parts, and what it was made from."""

    title: str
    """What was simulated, and where."""
    timeline: Timeline
    parts: dict[str, float]
    """Seconds by part, such as forward, communication, bubble."""
    estimate: Estimate | None = None
    """Of a job: the prediction that the replay follows."""
    planned_seconds: float | None = None
    """Of a job: the step that `plan` predicts."""
    planned_by: str = ""
    """Of a job: the cost model of `plan`, if it is not the one of the replay."""
    schedule: Schedule | None = None
    """Of a collective."""
    pipeline: Pipeline | None = None
    bubble: float | None = None
    """Of a pipeline: the share of time in which ranks wait."""
    activations: float | None = None
    """Of a pipeline: most micro-batches whose activations one rank stores at once."""

    @property
    def step_seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return self.timeline.seconds

    @property
    def critical_path(self) -> list[str]:
        """Names of the spans that the end waited for, in order: each begins when the one before ends."""
        path = []
        moment = max((s.end for s in self.timeline.spans), default=0.0)
        for s in sorted(self.timeline.spans, key=lambda s: s.end, reverse=True):
            if abs(s.end - moment) <= 1e-12 + 1e-9 * moment:
                path.append(s.name)
                moment = s.start
        return path[::-1]


def simulate(
    target: ModelInput,
    plan: PlanInput = "dp=1",
    cluster: ClusterInput = None,
    *,
    changes: Sequence[str] = (),
    ranks: int = 4,
    size: str | int = "1MiB",
    micro: int = 8,
    virtual: int = 1,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> Simulation:
    """Replay one step of a job or zoo model under `plan`; or `all_reduce:ring`, `pipeline:1f1b` and the like.

    A collective takes `ranks` and `size` (bytes of its buffer), a pipeline `ranks`, `micro` and `virtual`.
    """
    kind, _, name = str(target).partition(":") if isinstance(target, str | Path) else ("", "", "")
    if kind == "pipeline":
        return _simulate_pipeline(name, ranks, micro, virtual)
    if kind in _collectives():
        name = _current_word(name)
        _check_collective(kind, name, ranks)
        here, _ = load_cluster(cluster, changes=changes, notify=notify, progress=progress)
        return _simulate_collective(kind, name, ranks, size, here)
    return _simulate_step(target, plan, cluster, changes, notify, progress)


def _collectives() -> tuple[str, ...]:
    from ..schedules import ALGORITHMS

    return tuple(ALGORITHMS)


def _simulate_pipeline(name: str, ranks: int, micro: int, virtual: int) -> Simulation:
    from ..reports.schedule_text import most_activations
    from ..schedules import pipeline_order
    from ..simulator import bubble, replay_in_thirds

    order = pipeline_order(name, ranks, micro, virtual)
    timeline = replay_in_thirds(order)
    share = bubble(timeline)
    return Simulation(
        f"{name}: {ranks} ranks, {micro} micro-batches",
        timeline,
        {"compute": timeline.seconds * (1 - share), "bubble": timeline.seconds * share},
        pipeline=order,
        bubble=share,
        activations=most_activations(order, virtual),
    )


def _current_word(name: str) -> str:
    from ..schedules import OLD_WORDS

    return OLD_WORDS.get(name, name)


def _check_collective(kind: str, name: str, ranks: int) -> None:
    from ..schedules import ALGORITHMS

    if name not in ALGORITHMS[kind]:
        known = tuple(ALGORITHMS[kind])
        raise InputError(
            f"no algorithm {name!r} for {kind}", rule=f"one of {', '.join(known)}", fix=nearest(name, known)
        )
    if not 1 <= ranks <= LARGEST_COLLECTIVE:
        raise InputError(f"--ranks {ranks}", rule=f"from 1 to {LARGEST_COLLECTIVE} ranks")


def _simulate_collective(kind: str, name: str, ranks: int, size: str | int, cluster: Cluster) -> Simulation:
    from ..core.units import parse_bytes
    from ..schedules import collective_schedule
    from ..simulator import replay

    try:
        m = size if isinstance(size, int) else int(parse_bytes(size))
    except ValueError as e:
        raise InputError(f"--bytes {size}", rule=str(e)) from None
    schedule = collective_schedule(kind, name, ranks)
    timeline = replay(schedule, m, cluster.node.link)
    title = f"{size} on {cluster.name}'s node link"
    return Simulation(title, timeline, {"communication": timeline.seconds}, schedule=schedule)


def _simulate_step(
    target: ModelInput,
    plan: PlanInput,
    cluster: ClusterInput,
    changes: Sequence[str],
    notify: Notify,
    progress: Progress,
) -> Simulation:
    from ..costs import cost_model, estimate
    from ..plans import check
    from ..simulator.step import simulate_step

    chosen = load_plan(plan)
    check(chosen)
    devices = chosen.ranks if cluster is not None else None
    loaded, _ = load_cluster(cluster, devices=devices, changes=changes, notify=notify, progress=progress)
    machines = without_corrections(loaded)  # the replay knows none
    if chosen.ranks > machines.devices:
        raise InputError(
            f"{chosen} takes {chosen.ranks} ranks",
            rule=f"{machines.name} has {machines.devices} devices",
            fix=f"--cluster NAME, or a file from `drumline measure --ranks {chosen.ranks}`",
        )
    profile = load_profile(target)
    predicted = estimate(profile, chosen, machines)
    planner = cost_model(profile, machines, chosen.precision)  # what `plan` predicts with
    return Simulation(
        f"{profile.name} with {chosen} on {machines.name}",
        simulate_step(profile, chosen, machines),
        predicted.parts,
        estimate=predicted,
        planned_seconds=planner.estimate(chosen).step_seconds if planner.source else predicted.step_seconds,
        planned_by=planner.source,
    )
