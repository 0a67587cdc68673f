"""Measures how long a job's samples take to load, for the data part of an estimate."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

from ..core.errors import DrumlineError
from ..core.job import call_user_code
from .callbacks import Notify

if TYPE_CHECKING:
    from ..core.job import Job
    from ..costs.input_pipeline import InputPipeline

_SECONDS = 0.15
"""About how long is measured; a slow dataset is stopped after the first batch beyond it."""
_AT_ONCE = 16
"""Samples of one timed batch, at most."""
_BATCHES = 8


def measure_input(job: Job, notify: Notify) -> InputPipeline | None:
    """Load a few batches of the job, in the order of its first epoch; None, and a notice, if a sample cannot be loaded.

    The first batch, which opens files, counts only if there is no other.
    """
    from ..costs.input_pipeline import InputPipeline
    from ..datasets.stream import Stream, seeded_random

    try:
        stream = Stream(job, call_user_code(job.data, "the job's data()"))
        samples = [i for step in range(_BATCHES) for i in stream.samples(step)][: _BATCHES * _AT_ONCE]
        size = min(_AT_ONCE, job.batch_size, len(samples))
        times: list[float] = []
        began = time.perf_counter()
        for k in range(0, len(samples) - size + 1, size):
            start = time.perf_counter()
            with seeded_random(job.seed, k):
                stream.cut(samples[k : k + size], 0)
            times.append((time.perf_counter() - start) / size)
            if time.perf_counter() - began > _SECONDS:
                break
    except DrumlineError as e:
        notify(f"how long loading takes was not measured: {e.what}")
        return None
    warm = times[1:] or times
    return InputPipeline(statistics.median(warm), job.batch_size, job.workers, len(os.sched_getaffinity(0)))
