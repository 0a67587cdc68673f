"""`dl.simulate_scaling`: the same plan on several numbers of devices, with more or fewer replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.errors import ClusterError, InputError, PlanError
from ..core.units import format_bytes
from .inputs import load_plan
from .step_simulation import StepQuestion, load_question, replay_question

if TYPE_CHECKING:
    from ..planner.scaling_curve import ScalingPoint
    from ..plans import Plan
    from .inputs import ClusterInput, ModelInput, PlanInput

STRONG, WEAK = "strong", "weak"
MOST_COUNTS = 64


def simulate_scaling(
    target: ModelInput,
    plan: PlanInput,
    cluster: ClusterInput,
    devices: Sequence[int],
    *,
    scaling: str = STRONG,
    batch: int | None = None,
    sequence: int | None = None,
    **options: object,
) -> list[ScalingPoint]:
    """Replay a step of `plan` on each number of devices: `dp` is scaled, all other keys stay.

    `scaling` is `strong` (the same batch) or `weak` (the same samples for each replica). Other options are those of
    `simulate`. Efficiency is relative to the fewest devices.
    """
    if scaling not in (STRONG, WEAK):
        raise InputError(f"--scaling {scaling}", rule=f"{STRONG} (the same batch) or {WEAK} (a batch that grows)")
    chosen, counts = load_plan(plan), _checked(devices)
    plans = [_with_devices(chosen, n) for n in counts]
    points: list[ScalingPoint] = []
    for own in plans:
        # a job is traced once: its profile is used from then on
        try:
            question = load_question(target, own, cluster, batch=batch, sequence=sequence, **options)  # type: ignore[arg-type]  # passed on
        except ClusterError as e:
            raise ClusterError(
                e.what, where=e.where, rule=e.rule, fix="--sweep with other numbers of devices"
            ) from None
        target, sequence = question.profile, None
        points.append(_point(question, chosen, scaling))
    base = next((p for p in points if p.samples_per_second), None)
    each = base.samples_per_second / base.devices if base else 0.0
    return [dataclasses.replace(p, efficiency=p.samples_per_second / p.devices / each if each else 0.0) for p in points]


def _checked(devices: Sequence[int]) -> list[int]:
    if not devices or len(devices) > MOST_COUNTS or min(devices) < 1 or len(set(devices)) < len(devices):
        given = ",".join(map(str, devices))
        raise InputError(
            f"--sweep {given}", rule=f"1 to {MOST_COUNTS} different numbers of devices", fix="--sweep 8,16,32"
        )
    return sorted(devices)


def _with_devices(plan: Plan, n: int) -> Plan:
    """The plan with as many replicas as fill the devices."""
    each = plan.ranks // plan.dp
    if n % each:
        raise PlanError(
            f"{plan} on {n} devices",
            rule=f"one replica takes {each} devices: {n} % {each} = {n % each}",
            fix=f"--sweep with multiples of {each}",
        )
    return dataclasses.replace(plan, dp=n // each)


def _point(question: StepQuestion, given: Plan, scaling: str) -> ScalingPoint:
    from ..planner.scaling_curve import ScalingPoint

    profile, plan = question.profile, question.plan
    if scaling == WEAK:
        profile = dataclasses.replace(profile, batch_size=max(1, profile.batch_size * plan.dp // given.dp))
    size, needed = profile.batch_size, plan.micro * plan.slices
    if size < needed:
        rule = f"{plan.micro} micro-batches x {plan.slices} replicas need {needed} samples, the batch has {size}"
        return ScalingPoint(plan.ranks, str(plan), size, 0.0, 0.0, 0.0, rule)
    replay = replay_question(dataclasses.replace(question, profile=profile))
    e = replay.estimate
    assert e is not None and replay.samples_per_second is not None
    lacks = "" if e.fits else f"needs {format_bytes(e.memory_bytes)} of {format_bytes(e.memory_limit)}"
    return ScalingPoint(plan.ranks, str(plan), size, replay.step_seconds, replay.samples_per_second, 0.0, lacks)
