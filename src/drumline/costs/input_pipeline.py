"""The data part of a step: how long a rank loads its samples, and how long it has to wait for them.

Without workers, a rank loads between its steps. With them, processes load the next batches while it computes, and it
waits only if they are slower than the step.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ..core.units import format_seconds
from ..plans import Plan
from .estimate import Estimate

BOUND = 0.1
"""Share of its time that a rank waits for data, above which input is said to bound the step."""


@dataclass(frozen=True, slots=True)
class InputPipeline:
    """The measured loading of a job's samples, by one process on an idle core."""

    sample_seconds: float
    batch_size: int
    """Samples of a step, over all ranks."""
    workers: int = 0
    """Loading processes of each rank."""
    cores: int = 1
    """Shared by the processes of all ranks."""

    def load_seconds(self, plan: Plan) -> float:
        """One process loads the samples that a rank needs for a step."""
        return math.ceil(self.batch_size / plan.slices) * self.sample_seconds

    def wait_seconds(self, plan: Plan, step_seconds: float, workers: int | None = None) -> float:
        """The wait of a rank for the data of a step, besides the step itself."""
        workers = self.workers if workers is None else workers
        load, loaders = self.load_seconds(plan), plan.ranks * max(1, workers)
        load *= max(1.0, loaders / self.cores)
        at_once = plan.dp // plan.slices  # workers that compute whole batches: each takes the time of as many steps
        return max(0.0, load / workers / at_once - step_seconds) if workers else load / at_once

    def sufficient_workers(self, plan: Plan, step_seconds: float) -> int:
        """The fewest workers of a rank behind whose loading nothing is waited for; 0 if no number suffices."""
        most = max(1, self.cores // plan.ranks)
        fits = (n for n in range(1, most + 1) if not self.wait_seconds(plan, step_seconds, n))
        return next(fits, 0)


def with_input(e: Estimate, plan: Plan, pipeline: InputPipeline) -> Estimate:
    """The estimate with its data part. The step itself does not change: it is measured without the wait for data."""
    load, wait = pipeline.load_seconds(plan), pipeline.wait_seconds(plan, e.step_seconds)
    each = f"{format_seconds(load)} a step to load ({format_seconds(pipeline.sample_seconds)} a sample, measured here)"
    by = f"{pipeline.workers} workers" if pipeline.workers > 1 else "a worker" if pipeline.workers else "no workers"
    text = f"input: {each}, {by}: " + (f"{format_seconds(wait)} of waiting" if wait else "hidden behind the step")
    if bounds_step(wait, e.step_seconds):
        enough = pipeline.sufficient_workers(plan, e.step_seconds)
        way = (
            f"workers={enough} in the Job would hide it"
            if enough > pipeline.workers
            else "quicker samples (drumline pack) or more cores would"
        )
        text += f"; input bounds the step ({way})"
    return dataclasses.replace(e, data_seconds=load, data_wait_seconds=wait, input_text=text)


def bounds_step(wait: float, step_seconds: float) -> bool:
    """Whether the wait for data is a notable part of the time."""
    return wait > BOUND * (wait + step_seconds)
