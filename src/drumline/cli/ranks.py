"""What a rank does for a verb. The launcher starts these by name, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..clusters import DeviceSpec
    from ..runtime.checkpoint.during import Saves
    from ..runtime.guards.guard import Guards
    from ..runtime.verification.verify import Verification

Emit = Callable[[dict[str, Any]], None]


def train_rank(
    emit: Emit,
    reference: str,
    plan: str,
    steps: int,
    evaluate: bool,
    measured: DeviceSpec | None,
    guards: Guards,
    saves: Saves | None = None,
    flops_per_byte: float | None = None,
) -> dict[str, Any]:
    """Set the job up, tell how fast the machine is now against when it was `measured`, and train."""
    from ..core.job import Job
    from ..measurement.pulse import AFTER, during, expected, speed
    from ..measurement.starts import host_pace
    from ..runtime.engine import initialize
    from ..runtime.train import train

    engine = initialize(Job.load(reference), plan, guards=guards, flops_per_byte=flops_per_byte)
    if measured is None:
        return train(engine, emit, steps=steps, evaluate=evaluate, saves=saves)
    if engine.device.type == "cuda":  # its own speed is what it was; its host's is not
        pace = host_pace(measured, engine.device)
        if engine.rank == 0 and pace:
            emit({"pace": pace})
        result = train(engine, emit, steps=steps, evaluate=evaluate, saves=saves)
        after = host_pace(measured, engine.device) if pace else None
        return result | ({"pace": math.sqrt(pace * after), "drift": _drift(pace, after)} if pace and after else {})
    before = speed(measured, engine.device)
    if engine.rank == 0:
        emit({"speed": expected(before, engine.device)})
    result = train(engine, emit, steps=steps, evaluate=evaluate, saves=saves)
    after = speed(measured, engine.device, rounds=AFTER)
    return result | {"speed": during(before, after, engine.device), "drift": _drift(before, after)}


def _drift(before: float, after: float) -> float:
    """How far the pace of a machine has moved during a run, either way, as a logarithm."""
    return abs(math.log(after / before))


def verify_rank(emit: Emit, reference: str, plan: str, steps: int) -> Verification | None:
    """One rank's part of a verification; the first rank returns the result."""
    from ..core.job import Job
    from ..plans import Plan
    from ..runtime.verification.verify import verify

    return verify(Job.load(reference), Plan.parse(plan), steps=steps)
