"""`dl.simulate`: a step under a plan, a collective, or a pipeline order, replayed in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InputError, nearest
from .callbacks import Notify, Progress, ignore_progress, log_note
from .inputs import load_cluster
from .simulation_options import COLLECTIVE, JOB, PIPELINE, refuse_many_passes, refuse_other_options

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.timeline import Timeline
    from ..costs import Estimate
    from ..costs.link_traffic import LinkLoad
    from ..schedules import Pipeline, Schedule, UpdateProof
    from ..simulator import ClusterCollective
    from ..simulator.critical_path import PathPart
    from ..simulator.failures import FailureReplay
    from ..simulator.memory_curve import StageMemory
    from ..simulator.worker_replay import WorkerReplay
    from .inputs import ClusterInput, ModelInput, PlanInput, SlowRanks

RANKS, MICRO, SIZE = 4, 8, "1MiB"
"""Defaults for a collective or a pipeline schedule."""
LARGEST_COLLECTIVE = 1_000_000
"""Ranks of a collective; fewer if its ranks differ (`simulator.collective_replay.MOST_MESSAGES`)."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """A replay: its timeline, the step in parts, and what it was made from."""

    title: str
    """The simulated job or schedule, and its machines."""
    timeline: Timeline
    parts: dict[str, float]
    """Seconds by part, such as forward, communication, bubble."""
    estimate: Estimate | None = None
    """Of a job: the prediction that the replay follows."""
    planned_seconds: float | None = None
    """Of a job: the step that `plan` predicts; where `step_seconds` differs, `notes` say why."""
    planned_by: str = ""
    """Of a job: where fitted prices come from; empty if they are summed over operators."""
    memory: tuple[StageMemory, ...] = ()
    """Of a job: bytes over the time of the step, by pipeline stage. The highest peak is the estimate's."""
    links: tuple[LinkLoad, ...] = ()
    """Of a job: bytes and use of the links inside nodes and between them."""
    latency_seconds: float | None = None
    """Of a job: from a batch's first forward until its update. Longer than a step where batches overlap."""
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    """Of a job whose samples are sequences of tokens."""
    mfu: float | None = None
    """Of a job: operations of the model, forward and backward, per second over the peak rate of all devices."""
    failures: FailureReplay | None = None
    """Of a job and a mean time between failures: days of training with restarts."""
    notes: tuple[str, ...] = ()
    """Changes and assumptions of the replay, in sentences."""
    schedule: Schedule | None = None
    """Of a collective."""
    collective: ClusterCollective | None = None
    """Of a collective: its links and how busy they are, and its time by formula."""
    pipeline: Pipeline | None = None
    bubble: float | None = None
    """Of a pipeline: the share of time in which ranks wait."""
    activations: float | None = None
    """Of a pipeline: most micro-batches whose activations one rank stores at once."""
    workers: WorkerReplay | None = None
    """Of a job whose ranks differ, or do not wait for each other: throughput, waiting and staleness over many steps."""
    updates: UpdateProof | None = None
    """Of a pipeline that does not drain between batches: weight versions and staleness by stage."""

    def _repr_html_(self) -> str:
        from ..core.units import format_seconds
        from ..reports.notebook import summary, timeline_image

        rows = [[part, format_seconds(t)] for part, t in self.parts.items()]
        lead = f"{self.title}: {format_seconds(self.step_seconds)}"
        return summary(lead, ("part", "time"), rows, timeline_image(self.timeline, self.title))

    @property
    def step_seconds(self) -> float:
        """Seconds from the first start to the last end; of many steps, the mean."""
        return self.workers.step_seconds if self.workers is not None else self.timeline.seconds

    @property
    def critical_path(self) -> tuple[PathPart, ...]:
        """The spans that the end waited for, in order: each begins when the one before ends."""
        from ..simulator.critical_path import critical_path

        return critical_path(self.timeline)


def simulate(
    target: ModelInput,
    plan: PlanInput | None = None,
    cluster: ClusterInput = None,
    *,
    changes: Sequence[str] = (),
    ranks: int | None = None,
    size: str | int | None = None,
    micro: int | None = None,
    virtual: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    devices: int | None = None,
    slow: SlowRanks | None = None,
    jitter: float | None = None,
    slow_links: Sequence[str] = (),
    mtbf: str | float | None = None,
    restart: str | float | None = None,
    days: float | None = None,
    seed: int | None = None,
    corrections: bool = True,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> Simulation:
    """Replay one step of a job or zoo model under `plan` (dp=1); or `all_reduce:ring`, `pipeline:1f1b` and the like.

    A collective takes `ranks` (4) and `size` (1MiB, bytes of its buffer), a pipeline `ranks`, `micro` (8) and `virtual`
    (1). Options that a target does not take are refused.

    The step of a job takes as long as `plan` predicts. `sequence` is the number of tokens per sample of a zoo model;
    `devices` must be the number that the plan takes. Its ranks may differ: `slow` (`{3: 4.0}`: rank 3 takes four
    times as long) and `jitter` (standard deviation of step times over their mean). `slow_links` are texts such as
    `network:0.5` (at half the bandwidth) or `node@3:0.5` (inside node 3 alone). With `mtbf`, the mean time between
    failures of one device, `days` (30) of training are replayed with restarts from checkpoints, each of which
    takes `restart` (5 minutes). The same `seed` gives the same answer.
    """
    kind, _, name = str(target).partition(":") if isinstance(target, str | Path) else ("", "", "")
    options: dict[str, object] = {"plan": plan, "cluster": cluster, "changes": changes, "ranks": ranks, "size": size}
    options |= {"micro": micro, "virtual": virtual, "batch": batch, "sequence": sequence, "devices": devices}
    options |= {"slow": slow, "jitter": jitter, "slow_links": slow_links, "seed": seed, "corrections": corrections}
    options |= {"mtbf": mtbf, "restart": restart, "days": days}
    if kind == "pipeline":
        refuse_other_options(target, PIPELINE, options)
        micro, virtual = MICRO if micro is None else micro, 1 if virtual is None else virtual
        return _simulate_pipeline(name, RANKS if ranks is None else ranks, micro, virtual)
    if kind in _collectives():
        refuse_other_options(target, COLLECTIVE, options)
        name, ranks = _current_word(name), RANKS if ranks is None else ranks
        _check_collective(kind, name, ranks)
        here, _ = load_cluster(cluster, changes=changes, notify=notify, progress=progress)
        return _simulate_collective(kind, name, ranks, SIZE if size is None else size, here)
    _refuse_misspelt(kind, name)
    refuse_other_options(target, JOB, options)
    from .step_simulation import FailureOptions, simulate_job

    failures = FailureOptions.of(mtbf, restart, days)
    return simulate_job(
        target,
        "dp=1" if plan is None else plan,
        cluster,
        changes=changes,
        batch=batch,
        sequence=sequence,
        devices=devices,
        slow=slow,
        jitter=jitter,
        slow_links=slow_links,
        failures=failures,
        seed=seed,
        corrections=corrections,
        notify=notify,
        progress=progress,
    )


def _collectives() -> tuple[str, ...]:
    from ..schedules import ALGORITHMS

    return tuple(ALGORITHMS)


def _simulate_pipeline(name: str, ranks: int, micro: int, virtual: int) -> Simulation:
    from ..reports.schedule_text import most_activations
    from ..schedules import pipeline_order, prove_pipeline
    from ..simulator import bubble, replay_in_thirds

    refuse_many_passes(f"pipeline:{name}", ranks, micro, virtual)
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
        updates=prove_pipeline(order).updates,
    )


def _refuse_misspelt(kind: str, name: str) -> None:
    """Refuse `all_reduc:ring`, which is neither a job nor a model."""
    from ..schedules import ALGORITHMS, ORDERS

    known = ("pipeline", *ALGORITHMS)
    algorithms = {*ORDERS, *(word for words in ALGORITHMS.values() for word in words)}
    if _current_word(name) in algorithms and nearest(kind, known):
        raise InputError(f"no collective {kind!r}", rule=f"one of {', '.join(known)}", fix=nearest(kind, known))


def _current_word(name: str) -> str:
    from ..schedules import OLD_WORDS

    return OLD_WORDS.get(name, name)


def _check_collective(kind: str, name: str, ranks: int) -> None:
    from ..schedules import ALGORITHMS

    if name not in ALGORITHMS[kind]:
        known = tuple(ALGORITHMS[kind])
        what = f"no algorithm {name!r} for {kind}" if name else f"{kind} without an algorithm"
        fix = nearest(name, known) if name else f"{kind}:{known[0]}"
        raise InputError(what, rule=f"one of {', '.join(known)}", fix=fix)
    if not 1 <= ranks <= LARGEST_COLLECTIVE:
        raise InputError(f"--ranks {ranks}", rule=f"from 1 to {LARGEST_COLLECTIVE} ranks")


def _simulate_collective(kind: str, name: str, ranks: int, size: str | int, cluster: Cluster) -> Simulation:
    from ..core.units import parse_bytes
    from ..simulator import replay_on_cluster

    try:
        m = size if isinstance(size, int) else int(parse_bytes(size))
    except ValueError as e:
        raise InputError(f"--bytes {size}", rule=str(e)) from None
    if m < 0:
        raise InputError(f"--bytes {size}", rule="a buffer has zero bytes or more")
    collective = replay_on_cluster(kind, name, ranks, m, cluster)
    text = str(size) if str(size)[-1:] == "B" else f"{m} bytes"
    return Simulation(
        f"{text} over {collective.where}",
        collective.replay.timeline,
        {"communication": collective.replay.seconds},
        schedule=collective.schedule,
        collective=collective,
    )
