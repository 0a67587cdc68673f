"""Detection of slow workers by their coordinator, from the times that they report."""

from __future__ import annotations

import random

import pytest

from drumline.plans import Plan
from drumline.runtime.asynchronous.worker_comparison import WorkerComparison, data_seconds, times_row
from drumline.runtime.training.slowest_rank import EVERY, SLOW


def row(data: float, forward: float) -> list[float]:
    """The times of a task."""
    return times_row({"forward": forward, "backward": 2.0, "communication": 9.0, "waiting": 50.0}, data)


@pytest.mark.parametrize(("slow", "phase"), [(row(4.0, 1.0), "data"), (row(0.0, 6.0), "forward")])
def test_the_slowest_worker_and_its_phase_are_named(slow: list[float], phase: str) -> None:
    comparison = WorkerComparison(3)
    for _ in range(EVERY // 2):
        assert comparison.slowest() is None
        for worker in (0, 1, 2, 7):  # 7 has joined
            for _ in range(1 if worker == 1 else 3):
                comparison.add(worker, slow if worker == 1 else row(0.1, 1.0))
        comparison.add(0, ())  # a warm-up
    verdict = comparison.slowest()
    assert verdict is not None and verdict[:2] == (1, phase) and verdict[2] > SLOW
    assert comparison.slowest() is None, "every comparison needs new times"


def test_every_worker_takes_part_in_a_comparison() -> None:
    comparison = WorkerComparison(2)
    for _ in range(9 * EVERY):
        comparison.add(0, row(0.1, 1.0))
        assert comparison.slowest() is None


def test_even_workers_are_not_slow() -> None:
    chance = random.Random(1)
    for _ in range(200):
        comparison = WorkerComparison(4)
        for _ in range(EVERY):
            for worker in range(4):
                comparison.add(worker, row(0.1 * chance.random(), chance.uniform(0.8, 1.3)))
        verdict = comparison.slowest()
        assert verdict is not None and verdict[2] < SLOW


def test_the_data_part_of_an_update() -> None:
    assert data_seconds([row(3.0, 1.0)], Plan.parse("dp=3,sync=async")) == 1.0
    assert data_seconds([row(3.0, 1.0), row(5.0, 1.0)], Plan.parse("dp=2,sync=server")) == 4.0
    assert data_seconds([()], Plan.parse("dp=2,sync=async")) == 0.0
