"""What several verbs say and do about corrections: which file, what was learnt, keeping a run, forgetting."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import DrumlineError, InputError

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..core.timeline import Timeline
    from ..costs import Estimate
    from ..models import Profile
    from ..plans import Plan
    from ..reports import Run

LEAST_STEPS = 3
"""Counted steps, after warm-up and the recorded one, below which a run teaches nothing."""

NoCorrections = Annotated[
    bool, typer.Option("--no-corrections", help="Predict without what earlier runs taught, and teach nothing.")
]


def cluster_file(name: str | None, devices: int | None) -> Path | None:
    """The file that `cluster_of` reads for these; none for a name of the catalogue, which is no machine of ours."""
    from ..clusters import catalogue
    from .common import cached, local_devices

    if name is None:
        path = cached(max(devices or 1, local_devices()))
        return path if path.exists() else None
    if Path(name).suffix != ".toml" and "/" not in name and name in catalogue():
        return None
    return Path(name)


def with_corrections(cluster: Cluster, file: Path | None, *, use: bool) -> Cluster:
    """The cluster with what runs taught about its file; plain where that is not wanted, or cannot be read."""
    from ..clusters.corrections import Corrections
    from ..costs.history import beside, measurement_of, read, usable
    from ..costs.learnt import learnt

    plain = dataclasses.replace(cluster, corrections=Corrections())
    if not use or file is None or not beside(file).exists():
        return plain
    try:
        runs = read(beside(file))
    except DrumlineError as e:
        _not_used(beside(file), e)
        return plain
    mine = usable(runs, measurement=measurement_of(file), torch=torch_version())
    if len(mine) < len(runs):
        what = f"{len(runs) - len(mine)} of {len(runs)} runs in {beside(file)}"
        print(f"drumline: {what} were with another measurement or torch, and are not used", file=sys.stderr)
    return dataclasses.replace(cluster, corrections=learnt(mine))


def _not_used(file: Path, problem: DrumlineError) -> None:
    """Say why, in one line; nobody fails because of it."""
    rule = f" ({problem.rule})" if problem.rule else ""
    print(f"drumline: {file} is not used: {problem.what}{rule}", file=sys.stderr)


def torch_version() -> str:
    """As it is installed: reading it takes no import of torch."""
    from importlib.metadata import version

    return version("torch")


def keep(
    file: Path | None,
    run: Run,
    speed: float | None,
    phases: Sequence[Mapping[str, float]],
    steps: int,
    drift: float = 0.0,
) -> str:
    """Write down what a run measured, for the next prediction: each rank's own seconds by phase, of the median step.

    Gives back a sentence about it, or nothing.
    """
    from ..costs import estimate
    from ..costs.history import add, beside, measurement_of
    from ..costs.learnt import observe

    if file is None or not run.cluster.measured:
        return ""  # a data sheet is not what ran
    if steps < LEAST_STEPS:
        return f"not kept for corrections: {max(0, steps)} counted steps, {LEAST_STEPS} are the least"
    raw = estimate(run.profile, run.plan, with_corrections(run.cluster, None, use=False))
    try:
        seen = observe(
            run.profile,
            run.plan,
            raw.at_speed(speed) if speed else raw,
            step_seconds=run.step_seconds,
            phases=phases,
            each=[s.seconds for s in run.steps[-steps:]],
            when=datetime.datetime.now(datetime.UTC).isoformat(),
            torch=torch_version(),
            measurement=measurement_of(file),
            drift=drift,
        )
        count = add(beside(file), seen)
    except InputError as e:
        return f"not kept for corrections: {e.what}"
    return f"kept for corrections: {beside(file)}, {count} run{'s' if count > 1 else ''}"


def timeline_of(profile: Profile, plan: Plan, machines: Cluster, e: Estimate, speed: float) -> Timeline:
    """The predicted step; a correction stretches all of it alike, because the replay knows no corrections."""
    from ..costs import estimate
    from ..simulator.step import simulate_step

    plain = with_corrections(machines, None, use=False)
    speed *= e.uncorrected_seconds / e.step_seconds if e.step_seconds else 1.0
    return simulate_step(profile, plan, plain, estimate(profile, plan, plain).at_speed(speed), speed=speed)


def forget(ranks: int | None, output: str | None) -> list[Path]:
    """Remove what runs taught: about one cluster file, or about this machine with some or any number of ranks."""
    from ..costs.history import beside, forget
    from .common import cached

    if output is not None:
        paths = [beside(output)]
    elif ranks is not None:
        paths = [beside(cached(ranks))]
    else:
        head = cached(0).name.removesuffix("0.toml")
        paths = sorted(p for p in cached(0).parent.glob("*.corrections.json") if p.name.startswith(head))
    return [path for path in paths if forget(path)]


def here(profile: Profile, *, use: bool) -> Estimate | None:
    """The step on one device of this machine, where it has been measured and runs have taught something about it."""
    from ..clusters import Cluster
    from ..costs import estimate
    from ..costs.history import beside
    from ..planner import default_precision
    from ..plans import Plan

    file = cluster_file(None, None)
    if not use or file is None or not beside(file).exists():
        return None
    try:
        cluster = with_corrections(Cluster.load(file), file, use=True)
    except InputError as e:  # a profile needs no machine
        _not_used(file, e)
        return None
    found = estimate(profile, Plan(precision=default_precision(cluster)), cluster)
    return found if found.raw_seconds else None


def described(e: Estimate) -> str:
    """`corrected by 3 runs on this machine, 1 of them of this job (x1.18); 34 ms without`, or nothing."""
    from ..core.units import format_seconds

    return f"{e.correction}; {format_seconds(e.raw_seconds)} without" if e.raw_seconds else ""
