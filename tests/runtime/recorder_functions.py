"""Functions that test_recorder.py runs on ranks."""

from __future__ import annotations

import math
import time
from typing import Any

import small_jobs
import torch.distributed as dist

from drumline.runtime.engine import initialize


def messages(plan: str) -> dict[str, Any]:
    """Run three steps; what was recorded of the second, which has no set-up."""
    engine = initialize(small_jobs.make("mlp"), plan)
    for batch in engine.data(3):
        engine.step(batch)
    spans = engine.record.spans(1)
    seen = [s for s in spans if s.lane == "communication"]
    end = max(s.end for s in spans if s.lane != "communication")
    return {
        "messages": [(s.name, s.bytes) for s in seen],
        "phases": {s.name for s in spans if s.lane != "communication"},
        "inside": all(0 <= s.start <= s.end <= end + 0.05 for s in seen),
        "parameters": 4 * sum(math.prod(kind.shape) for kind in engine.parameter_specs.values()),
        "steps": engine.record.steps,
    }


def outside() -> tuple[bool, bool]:
    """Check that evaluation, which sends messages too, leaves the last step unchanged."""
    engine = initialize(small_jobs.make("mlp"), "dp=2")
    for batch in engine.data(2):
        engine.step(batch)
    before = engine.record.spans()
    engine.evaluate()
    return engine.record.spans() == before, getattr(dist.group.WORLD, "watch", 0) is None


SLOW = 0.3
"""Seconds; far more than a small step takes on a busy machine."""


def one_is_slow(plan: str) -> dict[str, float]:
    """The second rank's forward takes long."""
    engine = initialize(small_jobs.make("mlp"), plan)
    if engine.rank == 1:
        engine.model.register_forward_hook(lambda *_: time.sleep(SLOW))
    for batch in engine.data(3):
        engine.step(batch)
    return {"own": sum(engine.record.own_seconds().values()), "all": sum(engine.record.phase_seconds().values())}
