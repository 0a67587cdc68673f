"""What if: the same question with numbers changed, before and after side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..core.errors import DoesNotFit, InputError
from ..core.units import parse_bytes
from ..costs.what_if import what_if as changed
from ..models.profile import Profile
from ..plans import Plan
from .prices import prices
from .search import search

SHORT = {
    "devices": "how many devices",
    "memory": "memory of a device",
    "batch": "samples a step",
    "link": "node.link.bandwidth",
    "network": "network.link.bandwidth",
}
"""Short keys of `--what-if`; all others are keys of the cluster, such as node.link.alpha."""


@dataclass(frozen=True, slots=True)
class Side:
    """The answer to one of the two questions."""

    plan: str
    """Empty where nothing fits."""
    step_seconds: float
    samples_per_second: float
    memory_bytes: float
    parts: dict[str, float]
    devices: int
    batch_size: int
    explanation: str


@dataclass(frozen=True, slots=True)
class Compared:
    """Before and after."""

    changes: tuple[str, ...]
    before: Side
    after: Side
    old_plan_after: float
    """Seconds of the plan of before on the changed machines; 0 where it cannot run or does not fit there."""


def with_changes(profile: Profile, cluster: Cluster, fleet: Cluster, changes: Sequence[str]) -> tuple[Profile, Cluster]:
    """The model and the machines with every `KEY=VALUE` in place."""
    rest = []
    devices: int | None = None
    for text in changes:
        key, found, value = (x.strip() for x in text.partition("="))
        if not found or not value:
            raise InputError(f"--what-if {text}", rule="KEY=VALUE, such as link=400GB/s, devices=16 or batch=1024")
        if key == "batch":
            profile = replace(profile, batch_size=_whole(text, value, 10_000_000))
        elif key == "devices":
            devices = _whole(text, value, 10_000_000)
        elif key == "memory":
            try:
                cluster, fleet = (c.with_memory(parse_bytes(value)) for c in (cluster, fleet))
            except ValueError as e:
                raise InputError(f"--what-if {text}", rule=str(e)) from None
        else:
            rest.append(f"{SHORT.get(key, key)}={value}")
    machines = fleet.with_devices(devices) if devices is not None else cluster
    return profile, changed(machines, rest)


def _whole(text: str, value: str, most: int) -> int:
    if not value.isdigit() or not 1 <= int(value) <= most:
        raise InputError(f"--what-if {text}", rule=f"a whole number from 1 to {most:,}")
    return int(value)


def compare(
    profile: Profile,
    cluster: Cluster,
    fleet: Cluster,
    changes: Sequence[str],
    *,
    precision: str | None = None,
    objective: str = "time",
) -> Compared:
    """Both answers."""
    other, machines = with_changes(profile, cluster, fleet, changes)
    before = _side(profile, cluster, precision, objective)
    after = _side(other, machines, precision, objective)
    return Compared(tuple(changes), before, after, _kept(before.plan, other, machines))


def _kept(plan: str, profile: Profile, cluster: Cluster) -> float:
    """Seconds of a plan on other machines or with another batch; 0 where it cannot run or does not fit there."""
    same = Plan.parse(plan)
    if not plan or same.ranks > cluster.devices or same.dp * same.micro > profile.batch_size:
        return 0.0
    e = prices(profile, cluster, same.precision).estimate(same)
    return e.step_seconds if e.fits else 0.0


def _side(profile: Profile, cluster: Cluster, precision: str | None, objective: str) -> Side:
    try:
        answer, estimates = search(profile, cluster, precision=precision, objective=objective, brief=True)
    except DoesNotFit as e:
        return Side("", 0.0, 0.0, 0.0, {}, cluster.devices, profile.batch_size, f"{e.what}: {e.rule}")
    best = estimates[answer.candidates[0].plan]
    return Side(
        best.plan,
        best.step_seconds,
        profile.batch_size / best.step_seconds,
        best.memory_bytes,
        {k: v for k, v in best.parts.items() if v},
        cluster.devices,
        profile.batch_size,
        answer.explanation,
    )
