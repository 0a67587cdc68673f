"""Inputs of the loop: a job, a model, a plan and a cluster, each given as a value, a path or a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from ..core.errors import InputError, PlanError, nearest
from ..core.job import Job, call_user_code
from .callbacks import Notify, Progress, ignore_progress, log_note
from .main_guard import refuse_while_loading
from .measure import this_machine

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..models import Profile
    from ..plans import Plan

    JobInput = Job | Callable[[], Job] | str | Path
    """A job, a function that makes one, or `path.py` / `path.py:name`."""
    ModelInput = JobInput | Profile
    """Also a profile, `profile.json`, or a zoo name such as `gpt:7b`."""
    PlanInput = Plan | str | Path
    """A plan, the notation `dp=2,zero=1`, or a TOML file."""
    ClusterInput = Cluster | str | Path | None
    """A cluster, a TOML file, a catalogue name, or None for this machine."""
    SlowRanks = Mapping[int, float] | Sequence[str]
    """Slow ranks: factors by rank, or texts `RANK:FACTOR`."""

JOB_RULE = "a job is path.py or path.py:name"


def is_job_path(target: object) -> bool:
    """Whether a target is a path of a Python file, possibly with a name and a digest after it."""
    text = str(target) if isinstance(target, str | Path) else ""
    return ".py" in Path(text.partition(":")[0].partition("@")[0]).suffix or ".py:" in text or ".py@" in text


def is_job(target: object) -> TypeGuard[JobInput]:
    """Whether a target is a job or names one: it has a model that can run."""
    return isinstance(target, Job) or callable(target) or is_job_path(target)


def describe(target: ModelInput) -> str:
    """A target as the user would write it."""
    if isinstance(target, str | Path):
        return str(target)
    return getattr(target, "source", "") or getattr(target, "name", "") or getattr(target, "__name__", "job")


def load_job(job: JobInput, *, rule: str = JOB_RULE) -> Job:
    """The job that was given, or the one that a file or a function makes."""
    refuse_while_loading()
    if isinstance(job, Job):
        return job
    if callable(job):
        made = call_user_code(job, f"{job.__name__}()")
        if not isinstance(made, Job):
            raise InputError(f"{job.__name__}() returned {type(made).__name__}", rule="it returns a drumline.Job")
        return made
    if not is_job_path(job):
        raise InputError(f"{describe(job)!r} is not a job", rule=rule)
    return Job.load(str(job))


def load_profile(
    target: ModelInput,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: str = "",
    device: str = "cpu",
    data_flow: bool = False,
) -> Profile:
    """The profile of a job (traced) or a zoo model (by formula), or a saved one.

    A job is traced in fp32, or in half precision as a device of that kind computes: see `profile_in_precision`. With
    `data_flow` its profile has the graph of the forward. `sequence` is the number of tokens per sample of a zoo model.
    """
    from ..models import Profile

    if sequence is not None and (isinstance(target, Profile) or is_job(target) or str(target).endswith(".json")):
        raise InputError(
            f"--sequence {sequence} for {describe(target)}",
            rule="only zoo models have a sequence length to choose: the samples of a job or a profile have theirs",
            fix="change the job's data, or name a zoo model such as gpt:7b",
        )
    if isinstance(target, Profile):
        profile = target
    elif is_job(target):
        profile = _traced(target, precision, device, data_flow)
    elif str(target).endswith(".json"):
        profile = Profile.load(str(target))
    else:
        from ..models import zoo

        name = str(target)
        if not zoo.is_zoo(name):
            raise InputError(
                f"{name!r} is no job and no model",
                rule="a job is path.py or path.py:name; a profile is path.json; a model is a zoo name such as gpt:7b",
                fix=nearest(name, zoo.names()),
            )
        return zoo.profile(name, batch_size=batch, sequence=sequence)
    return profile if batch is None else dataclasses.replace(profile, batch_size=batch)


def _traced(target: JobInput, precision: str, device: str, data_flow: bool = False) -> Profile:
    from ..tracing import trace
    from ..tracing.autocast import HALF_DTYPES

    job = load_job(target)
    if precision in HALF_DTYPES:
        return trace(job, precision=precision, device=device, data_flow=data_flow)
    return trace(job, data_flow=data_flow)


def profile_in_precision(target: ModelInput, profile: Profile, precision: str, device: str) -> Profile:
    """A job's profile with every cast that a device of that kind makes in half precision; others unchanged.

    Traced again rather than scaled: some operators stay in fp32, and casts cost time and memory.
    """
    if not is_job(target) or profile.precision:
        return profile
    from ..tracing.autocast import HALF_DTYPES

    if precision not in HALF_DTYPES:
        return profile
    return dataclasses.replace(_traced(target, precision, device), batch_size=profile.batch_size)


def load_plan(plan: PlanInput) -> Plan:
    """The plan that was given, in a file, or in the notation."""
    from ..plans import Plan

    if isinstance(plan, Plan):
        return plan
    text = str(plan)
    return Plan.load(text) if text.endswith(".toml") else Plan.parse(text)


def check_local(plan: Plan) -> None:
    """Refuse a plan whose ranks Drumline cannot start itself."""
    from ..core.rank_info import is_launched

    if plan.backend == "mpi" and not is_launched():
        raise PlanError(
            "backend=mpi on ranks that Drumline starts",
            where=f"plan {plan}",
            rule="MPI's ranks are started by mpiexec",
            fix=f"mpiexec -n {plan.ranks} drumline train ..., or leave out backend=mpi",
        )


def with_step_times(
    cluster: Cluster, slow: SlowRanks | None = None, jitter: float | None = None, seed: int | None = None
) -> Cluster:
    """The cluster whose ranks differ: `slow` has factors by rank, or texts `RANK:FACTOR`. What is not given stays."""
    from ..clusters import StepTimeDistribution

    own = cluster.step_times
    texts = [f"{rank}:{factor}" for rank, factor in slow.items()] if isinstance(slow, Mapping) else slow
    spread = StepTimeDistribution.of(
        texts or map(str, own.slow), own.jitter if jitter is None else jitter, own.seed if seed is None else seed
    )
    spread.check_ranks(cluster.devices)
    return dataclasses.replace(cluster, step_times=spread)


def load_cluster(
    cluster: ClusterInput,
    *,
    devices: int | None = None,
    memory: str | float | None = None,
    changes: Sequence[str] = (),
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> tuple[Cluster, Cluster]:
    """The cluster with that many devices, and the whole fleet that they are taken from.

    None is this machine: measured now, unless it was measured before. `changes` are KEY=VALUE, such as
    `node.link.bandwidth=400GB/s`.
    """
    from ..clusters import Cluster, load
    from ..core.units import parse_bytes

    if devices is not None and devices < 1:
        raise InputError(f"devices={devices}", rule="at least one device")
    if cluster is None:
        fleet = this_machine(devices, notify=notify, progress=progress)
    else:
        fleet = cluster if isinstance(cluster, Cluster) else load(str(cluster))
    if changes:
        from ..costs.what_if import with_changes

        fleet = with_changes(fleet, changes)
    if memory is not None:
        try:
            fleet = fleet.with_memory(parse_bytes(memory) if isinstance(memory, str) else memory)
        except ValueError as e:
            raise InputError(f"memory={memory}", rule=str(e)) from None
    return (fleet if devices is None else fleet.with_devices(devices)), fleet
