"""Functions that ranks run for benchmarks/regret.py: set up a plan, run a block of steps, free a plan."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

from drumline.core.job import Job
from drumline.runtime.engine import initialize

from .served import ENGINES

_BATCHES: dict[str, Iterator[Any]] = {}
MANY = 100_000
"""Upper bound on the steps of an engine."""


def set_up(reference: str, plan: str, warm: int) -> None:
    """Build an engine for a job under a plan and run its warm-up steps."""
    key = f"{reference} {plan}"
    if key not in ENGINES:
        ENGINES[key] = initialize(Job.load(reference), plan)
        _BATCHES[key] = iter(ENGINES[key].data(MANY))
    block(reference, plan, warm)


def block(reference: str, plan: str, steps: int) -> float:
    """Time some steps: the median seconds, without fetching the batch."""
    key = f"{reference} {plan}"
    engine, batches, times = ENGINES[key], _BATCHES[key], []
    for _ in range(steps):
        batch = next(batches)
        start = time.perf_counter()
        engine.step(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def forget(reference: str, plan: str) -> None:
    """Free the engine of a plan."""
    key = f"{reference} {plan}"
    _BATCHES.pop(key, None)
    ENGINES.pop(key, None)
    gc.collect()
