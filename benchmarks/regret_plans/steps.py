"""What a rank does for benchmarks/regret.py: it sets plans up, runs blocks of steps, and forgets plans again."""

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
"""Steps that an engine may run in all."""


def set_up(reference: str, plan: str, warm: int) -> None:
    """An engine for a job under a plan, and its first steps, which are not counted."""
    key = f"{reference} {plan}"
    if key not in ENGINES:
        ENGINES[key] = initialize(Job.load(reference), plan)
        _BATCHES[key] = iter(ENGINES[key].data(MANY))
    block(reference, plan, warm)


def block(reference: str, plan: str, steps: int) -> float:
    """The median seconds of some steps; fetching a batch is not a part of them."""
    key = f"{reference} {plan}"
    engine, batches, times = ENGINES[key], _BATCHES[key], []
    for _ in range(steps):
        batch = next(batches)
        start = time.perf_counter()
        engine.step(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def forget(reference: str, plan: str) -> None:
    """Free what a plan has."""
    key = f"{reference} {plan}"
    _BATCHES.pop(key, None)
    ENGINES.pop(key, None)
    gc.collect()
