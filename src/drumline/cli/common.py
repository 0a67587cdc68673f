"""What several verbs need: the job or model that is meant, the cluster that is meant, and printing."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import InputError, nearest

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..models import Profile
    from ..plans import Plan

Changes = Annotated[
    list[str] | None, typer.Option("--set", help="What if: node.link.bandwidth=400GB/s (again and again).")
]
"""The option that changes numbers of the cluster."""


def is_job(text: str) -> bool:
    """Whether a target is a Python file, perhaps with a name and a digest behind it."""
    return ".py" in Path(text.partition(":")[0].partition("@")[0]).suffix or ".py:" in text or ".py@" in text


def profile_of(target: str, *, batch: int | None = None, precision: str = "", device: str = "cpu") -> Profile:
    """The profile of a job (traced), of a zoo model (by formula), or from a saved file.

    A job is traced in fp32, or at once as a device of that kind computes in the precision: see `profile_in`.
    """
    import dataclasses

    if is_job(target):
        from ..core.job import Job
        from ..tracing import trace
        from ..tracing.autocast import HALVES

        half = precision in HALVES
        profile = trace(Job.load(target), precision=precision, device=device) if half else trace(Job.load(target))
        return profile if batch is None else dataclasses.replace(profile, batch_size=batch)
    if target.endswith(".json"):
        from ..models import Profile

        profile = Profile.load(target)
        return profile if batch is None else dataclasses.replace(profile, batch_size=batch)
    from ..models import zoo

    if not zoo.is_zoo(target):
        raise InputError(
            f"{target!r} is no job and no model",
            rule="a job is path.py or path.py:name; a profile is path.json; a model is one of the zoo, such as gpt:7b",
            fix=nearest(target, zoo.names()),
        )
    return zoo.profile(target, batch_size=batch)


def profile_in(target: str, profile: Profile, precision: str, device: str) -> Profile:
    """A job's profile as a device of that kind computes in half a float: with every cast. Others are as they are.

    Traced once more, and not scaled: some operators stay in fp32, and casts cost time and memory.
    """
    import dataclasses

    if not is_job(target) or profile.precision:
        return profile
    from ..core.job import Job
    from ..tracing import trace
    from ..tracing.autocast import HALVES

    if precision not in HALVES:
        return profile
    again = trace(Job.load(target), precision=precision, device=device)
    return dataclasses.replace(again, batch_size=profile.batch_size)


def cluster_of(
    name: str | None, devices: int | None, memory: str | None, *, changes: Sequence[str] | None = None, say: bool = True
) -> tuple[Cluster, Cluster]:
    """The cluster that was named, or this machine: measured now, unless it was measured before.

    Second, what it was taken from: with as many devices as there may be. `changes` are what `--set` asks for.
    """
    from ..clusters import load
    from ..core.units import parse_bytes
    from ..costs.what_if import what_if

    if devices is not None and devices < 1:
        raise InputError(f"--devices {devices}", rule="at least one device")
    fleet = what_if(load(name) if name is not None else this_machine(devices, say=say), changes or ())
    if memory is not None:
        try:
            fleet = fleet.with_memory(parse_bytes(memory))
        except ValueError as e:
            raise InputError(f"--memory {memory}", rule=str(e)) from None
    return (fleet if devices is None else fleet.with_devices(devices)), fleet


def this_machine(ranks: int | None, *, say: bool = True) -> Cluster:
    """This machine with that many ranks, from the cache or measured now."""
    from ..clusters import Cluster
    from .measure import measure_now

    ranks = max(ranks or 1, local_devices())
    path = cached(ranks)
    if path.exists():
        return Cluster.load(path)
    if say:
        print(f"measuring this machine with {ranks} ranks (once; kept in {path})", file=sys.stderr)
    cluster = measure_now(ranks, quiet=not say)
    try:
        cluster.save(path)
    except InputError as e:
        print(f"drumline: the measurement is not kept: {e.what}", file=sys.stderr)
    return cluster


def local_devices() -> int:
    """How many ranks this machine has room for: its GPUs, or its cores."""
    if Path("/dev/nvidiactl").exists():
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return os.cpu_count() or 1


def cached(ranks: int) -> Path:
    """Where the measurement of this machine with that many ranks is kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "drumline"
    return Path(os.environ.get("DRUMLINE_CACHE") or folder) / f"{platform.node() or 'here'}-{ranks}.toml"


def plan_of(text: str) -> Plan:
    """A plan from the notation or from a file."""
    from ..plans import Plan

    return Plan.load(text) if text.endswith(".toml") else Plan.parse(text)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1, allow_nan=False))
