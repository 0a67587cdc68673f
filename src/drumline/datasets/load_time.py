"""Measures how long a job's samples take to load, for the data part of an estimate."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import DrumlineError

if TYPE_CHECKING:
    from ..core.job import Job
    from ..costs.input_pipeline import InputPipeline

_SECONDS = 0.15
"""About how long is measured; a slow dataset is stopped after the first batch beyond it."""
_AT_ONCE = 16
"""Samples of one timed batch, at most."""
_BATCHES = 8


def measure_load_time(job: Job, notify: Callable[[str], None]) -> InputPipeline | None:
    """Load samples of the first batches of the job; None, and a notice, if a sample cannot be loaded.

    The first batch, which opens files, counts only if there is no other.
    """
    from ..costs.input_pipeline import InputPipeline
    from .seeding import seeded_random
    from .sources import StreamSource, load_data
    from .stream import Stream

    try:
        stream = Stream(job, load_data(job))
        in_order = isinstance(stream.source, StreamSource)
        times: list[float] = []
        with seeded_random(job.seed):
            stream.cut(stream.samples(0)[:1], 0)  # whether samples draw random numbers is found out here, untimed
        stream.source.draws = bool(stream.source.draws)
        began = time.perf_counter()
        for step in range(_BATCHES):
            start = time.perf_counter()
            numbers = stream.samples(step)
            if not in_order:  # reading a stream is work, choosing samples is not
                start, numbers = time.perf_counter(), numbers[:_AT_ONCE]
            with seeded_random(job.seed, step):
                stream.cut(numbers, 0)
            times.append((time.perf_counter() - start) / len(numbers))
            if time.perf_counter() - began > _SECONDS:
                break
    except DrumlineError as e:
        notify(f"how long loading takes was not measured: {e.what}")
        return None
    warm = times[1:] or times
    return InputPipeline(statistics.median(warm), job.batch_size, stream.workers, len(os.sched_getaffinity(0)))
