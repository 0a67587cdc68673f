"""What-if comparison: the same search with quantities changed, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..clusters import Cluster
from ..core.errors import DoesNotFit, InputError
from ..core.units import parse_bytes
from ..costs.what_if import with_changes as changed
from ..models.profile import Profile
from ..plans import Plan
from .reserve import Reserve
from .search import price, search

SHORT_KEYS = {
    "devices": "number of devices",
    "memory": "memory per device",
    "batch": "samples per step",
    "link": "node.link.bandwidth",
    "network": "network.link.bandwidth",
}
"""Short keys of `--what-if`; all others are keys of the cluster file, such as node.link.alpha."""


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """The answer before or after the changes."""

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
class WhatIfComparison:
    """The answers before and after the changes."""

    changes: tuple[str, ...]
    before: WhatIfAnswer
    after: WhatIfAnswer
    old_plan_after: float
    """Step time of the old plan after the changes; 0 where it cannot run or does not fit."""


def with_changes(profile: Profile, cluster: Cluster, fleet: Cluster, changes: Sequence[str]) -> tuple[Profile, Cluster]:
    """The profile and the cluster with every `KEY=VALUE` applied."""
    rest = []
    devices: int | None = None
    for text in changes:
        key, equals, value = (x.strip() for x in text.partition("="))
        if not equals or not value:
            raise InputError(f"--what-if {text}", rule="KEY=VALUE, such as link=400GB/s, devices=16 or batch=1024")
        if key == "batch":
            profile = replace(profile, batch_size=_whole_number(text, value, 10_000_000))
        elif key == "devices":
            devices = _whole_number(text, value, 10_000_000)
        elif key == "memory":
            try:
                cluster, fleet = (c.with_memory(parse_bytes(value)) for c in (cluster, fleet))
            except ValueError as e:
                raise InputError(f"--what-if {text}", rule=str(e)) from None
        else:
            rest.append(f"{SHORT_KEYS.get(key, key)}={value}")
    machines = fleet.with_devices(devices) if devices is not None else cluster
    return profile, changed(machines, rest)


def _whole_number(text: str, value: str, most: int) -> int:
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
    reserve: Reserve = None,
) -> WhatIfComparison:
    """Search before and after the changes."""
    other, machines = with_changes(profile, cluster, fleet, changes)
    before = _answer(profile, cluster, precision, objective, reserve)
    after = _answer(other, machines, precision, objective, reserve)
    return WhatIfComparison(tuple(changes), before, after, _old_plan_seconds(before.plan, other, machines))


def _old_plan_seconds(notation: str, profile: Profile, cluster: Cluster) -> float:
    """Step time of a plan on another cluster or batch; 0 where it cannot run or does not fit."""
    plan = Plan.parse(notation)
    if not notation or plan.ranks > cluster.devices or plan.dp * plan.micro > profile.batch_size:
        return 0.0
    e = price(profile, cluster, plan)
    return e.step_seconds if e.fits else 0.0


def _answer(
    profile: Profile, cluster: Cluster, precision: str | None, objective: str, reserve: Reserve
) -> WhatIfAnswer:
    ask = partial(search, precision=precision, objective=objective, brief=True, reserve=reserve)
    try:
        answer, estimates = ask(profile, cluster)
    except DoesNotFit as e:
        return WhatIfAnswer("", 0.0, 0.0, 0.0, {}, cluster.devices, profile.batch_size, f"{e.what}: {e.rule}")
    best = estimates[str(answer.best.plan)]
    return WhatIfAnswer(
        best.plan,
        best.step_seconds,
        profile.batch_size / best.step_seconds,
        best.memory_bytes,
        {k: v for k, v in best.parts.items() if v},
        cluster.devices,
        profile.batch_size,
        answer.explanation,
    )
