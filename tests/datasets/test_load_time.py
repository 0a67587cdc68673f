"""How long a job's samples take to load is measured before a plan, and said where it matters."""

from __future__ import annotations

import time
from typing import Any

import small_jobs

from drumline.datasets.load_time import measure_load_time


class Slow(small_jobs.Samples):
    """Samples that take at least 3 ms."""

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.003)
        return super().__getitem__(i)


class Broken(small_jobs.Samples):
    """No sample can be read."""

    def __getitem__(self, i: int) -> Any:
        raise OSError("disk")


def test_measured() -> None:
    job = small_jobs.make("mlp", data=lambda: Slow("vector"), workers=2)
    pipeline = measure_load_time(job, print)
    assert pipeline is not None and pipeline.sample_seconds >= 0.003
    assert (pipeline.batch_size, pipeline.workers) == (job.batch_size, 2)


def test_a_failing_sample_is_no_failure_of_the_plan() -> None:
    said: list[str] = []
    assert measure_load_time(small_jobs.make("mlp", data=lambda: Broken("vector")), said.append) is None
    assert said == [f"how long loading takes was not measured: {said[0].partition(': ')[2]}"] and "disk" in said[0]
