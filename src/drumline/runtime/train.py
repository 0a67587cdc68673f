"""Trains a job on this rank and tells the launcher about every step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from .engine import Engine
from .probe import Probe

WARM_UP = 2
"""Steps that are not counted in the measured step time; the next one is looked at under the profiler."""


def train(engine: Engine, emit: Callable[[dict[str, Any]], None], *, steps: int, evaluate: bool) -> dict[str, Any]:
    """One rank's whole run: `emit` gets a record per step from the first rank."""
    probe = Probe(engine)
    probed = min(WARM_UP, steps - 1)
    seconds: list[float] = []
    waits: list[float] = []
    asked = time.perf_counter()
    for batch in engine.data(steps):
        waits.append(time.perf_counter() - asked)
        number = engine.steps
        start = time.perf_counter()
        loss = probe.run(batch) if number == probed else engine.step(batch)
        seconds.append(time.perf_counter() - start)
        if engine.rank == 0:
            emit(
                {
                    "step": number, "loss": loss, "grad_norm": engine.grad_norm, "seconds": seconds[-1],
                    "samples": batch.samples, "memory_bytes": probe.peak_bytes, "data_seconds": waits[-1],
                    "probed": number == probed,
                }
            )  # fmt: skip
        asked = time.perf_counter()
    counted = [t for i, t in enumerate(seconds) if i > probed] or seconds[-1:]
    return {
        "step_seconds": statistics.median(counted),
        "data_seconds": statistics.median(waits),
        "peak_bytes": probe.peak_bytes,
        "parts": probe.parts,
        "spans": probe.spans,
        "probed": probed,
        "evaluation": engine.evaluate() if evaluate else {},
        "device": engine.device.type,
    }
