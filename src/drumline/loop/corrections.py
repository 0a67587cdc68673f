"""Corrections: what earlier runs on a machine taught about predictions, kept next to its cluster file."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import DrumlineError, InputError
from .callbacks import Notify, Progress, ignore_progress, log_note
from .inputs import load_cluster
from .measure import cached_cluster, machine_file

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.timeline import Timeline
    from ..costs import Estimate
    from ..models import Profile
    from ..plans import Plan
    from ..reports import Run
    from .inputs import ClusterInput

LEAST_STEPS = 3
"""A run with fewer counted steps (after warm-up and the recorded one) teaches nothing."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The devices to plan for, and where they come from."""

    cluster: Cluster
    fleet: Cluster
    """With as many devices as there may be."""
    file: Path | None
    """The cluster file, if it is of a measured machine: corrections are kept next to it."""


def load_machines(
    cluster: ClusterInput,
    devices: int | None,
    *,
    corrections: bool,
    memory: str | float | None = None,
    changes: Sequence[str] = (),
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> Machines:
    """Load or measure the cluster, with the corrections of earlier runs if asked for."""
    chosen, fleet = load_cluster(
        cluster, devices=devices, memory=memory, changes=changes, notify=notify, progress=progress
    )
    file = cluster_file(cluster, devices)
    if file is not None or not corrections:
        chosen = with_corrections(chosen, file, use=corrections, notify=notify)
    return Machines(chosen, dataclasses.replace(fleet, corrections=chosen.corrections), file)


def cluster_file(cluster: ClusterInput, devices: int | None) -> Path | None:
    """The file that `load_cluster` reads for these; none for a value or a catalogue name."""
    from ..clusters import Cluster, catalogue

    if cluster is None:
        path = machine_file(devices)
        return path if os.path.exists(path) else None  # not Path.exists: a home that cannot be read is no error
    if isinstance(cluster, Cluster):
        return None
    name = str(cluster)
    if Path(name).suffix != ".toml" and "/" not in name and name in catalogue():
        return None
    return Path(name)


def without_corrections(cluster: Cluster) -> Cluster:
    """The cluster as it was measured."""
    from ..clusters.corrections import Corrections

    return dataclasses.replace(cluster, corrections=Corrections())


def with_corrections(cluster: Cluster, file: Path | None, *, use: bool, notify: Notify = log_note) -> Cluster:
    """The cluster with what runs taught about its file; as measured if that is not wanted, or cannot be read."""
    from ..costs.correction_fit import fit_corrections
    from ..costs.observed_runs import cluster_digest, corrections_file, read_runs, usable_runs

    plain = without_corrections(cluster)
    if not use or file is None or not corrections_file(file).exists():
        return plain
    path = corrections_file(file)
    try:
        runs = read_runs(path)
    except DrumlineError as e:
        notify(_not_used(path, e))
        return plain
    valid = usable_runs(runs, measurement=cluster_digest(file), torch=torch_version())
    if len(valid) < len(runs):
        what = f"{len(runs) - len(valid)} of {len(runs)} runs in {path}"
        notify(f"{what} are not used: they belong to another measurement or torch version")
    return dataclasses.replace(cluster, corrections=fit_corrections(valid))


def _not_used(file: Path, problem: DrumlineError) -> str:
    return f"{file} is not used: {problem.what}" + (f" ({problem.rule})" if problem.rule else "")


def torch_version() -> str:
    """The installed version of torch, read without importing it."""
    from importlib.metadata import version

    return version("torch")


def keep_run(
    file: Path | None,
    run: Run,
    speed: float | None,
    phases: Sequence[Mapping[str, float]],
    steps: int,
    drift: float = 0.0,
) -> str:
    """Record what a run measured, for later predictions; a sentence about it, or nothing.

    `phases` are each rank's own seconds by phase, of the median step; `steps` how many steps were counted.
    """
    from ..costs import estimate
    from ..costs.observed_runs import add_run, cluster_digest, corrections_file, observed_run

    if file is None or not run.cluster.measured:
        return ""  # the run was predicted from a data sheet
    if steps < LEAST_STEPS:
        return f"not used for corrections: {max(0, steps)} counted steps, at least {LEAST_STEPS} are needed"
    raw = estimate(run.profile, run.plan, without_corrections(run.cluster))
    try:
        observed = observed_run(
            run.profile,
            run.plan,
            raw.at_speed(speed) if speed else raw,
            step_seconds=run.step_seconds,
            phases=phases,
            each=[s.seconds for s in run.steps[-steps:]],
            when=datetime.datetime.now(datetime.UTC).isoformat(),
            torch=torch_version(),
            measurement=cluster_digest(file),
            drift=drift,
        )
        count = add_run(corrections_file(file), observed)
    except InputError as e:
        return f"not used for corrections: {e.what}"
    return f"recorded for corrections: {corrections_file(file)}, {count} run{'s' if count > 1 else ''}"


def predicted_timeline(profile: Profile, plan: Plan, cluster: Cluster, e: Estimate, speed: float) -> Timeline:
    """The simulated step, which ends with its estimate `e`; all ranks, to compare with those of a run.

    Replays of ranks that differ ignore corrections, so these stretch all of them evenly.
    """
    from ..simulator.step import simulate_step, unfolded
    from ..simulator.workers import plan_timeline

    plain = without_corrections(cluster)
    if plan.sync == "allreduce" and not cluster.step_times:
        return unfolded(simulate_step(profile, plan, plain, estimate=e))
    speed *= e.uncorrected_seconds / e.step_seconds if e.step_seconds else 1.0
    return plan_timeline(profile, plan, plain, speed=speed)


def forget_runs(ranks: int | None, output: str | None) -> list[Path]:
    """Remove what runs taught: about one cluster file, or about this machine with some or any number of ranks."""
    from ..costs.observed_runs import corrections_file, remove_runs

    if output is not None:
        paths = [corrections_file(output)]
    elif ranks is not None:
        paths = [corrections_file(cached_cluster(ranks))]
    else:
        any_count = cached_cluster(0)
        prefix = any_count.name.removesuffix("0.toml")
        paths = sorted(p for p in any_count.parent.glob("*.corrections.json") if p.name.startswith(prefix))
    return [path for path in paths if remove_runs(path)]


def estimate_here(profile: Profile, *, use: bool, notify: Notify = log_note) -> Estimate | None:
    """The corrected step on one device of this machine; none if it was not measured or no run has taught anything."""
    from ..clusters import Cluster
    from ..costs import estimate
    from ..costs.observed_runs import corrections_file
    from ..planner import default_precision
    from ..plans import Plan

    file = cluster_file(None, None)
    if not use or file is None or not corrections_file(file).exists():
        return None
    try:
        cluster = with_corrections(Cluster.load(file), file, use=True, notify=notify)
    except InputError as e:  # a profile needs no machine
        notify(_not_used(file, e))
        return None
    corrected = estimate(profile, Plan(precision=default_precision(cluster)), cluster)
    return corrected if corrected.raw_seconds else None
