"""The schedules of replicas that step alone: when local SGD averages, and who gossips with whom."""

from __future__ import annotations

import pytest

from drumline.schedules import AveragingSchedule, random_partner, ring_neighbours
from drumline.schedules.averaging import ALL, ALONE, HOST


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (AveragingSchedule(1), [ALL] * 8),
        (AveragingSchedule(4), [ALONE, ALONE, ALONE, ALL] * 2),
        (AveragingSchedule(4, first=2), [ALL, ALL, ALONE, ALL, ALONE, ALONE, ALONE, ALL]),
        (AveragingSchedule(2, across=4), [ALONE, HOST, ALONE, ALL] * 2),
        (AveragingSchedule(2, first=2, across=4), [ALL, ALL, ALONE, ALL, ALONE, HOST, ALONE, ALL]),
    ],
)
def test_when_local_steps_are_averaged(schedule: AveragingSchedule, expected: list[str]) -> None:
    assert [schedule.after(step) for step in range(1, 9)] == expected


@pytest.mark.parametrize(("ranks", "count"), [(1, 0), (2, 1), (3, 2), (4, 2), (7, 2)])
def test_neighbours_on_a_ring_are_mutual(ranks: int, count: int) -> None:
    for rank in range(ranks):
        neighbours = ring_neighbours(rank, ranks)
        assert len(neighbours) == count and rank not in neighbours
        assert all(rank in ring_neighbours(other, ranks) for other in neighbours)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_a_random_matching_leaves_at_most_one_rank_alone(ranks: int) -> None:
    met = set()
    for step in range(200):
        partners = {rank: random_partner(rank, ranks, seed=3, step=step) for rank in range(ranks)}
        assert sum(partner is None for partner in partners.values()) == ranks % 2
        assert all(partners[p] == rank and p != rank for rank, p in partners.items() if p is not None)
        met |= {(rank, p) for rank, p in partners.items() if p is not None}
    assert len(met) == ranks * (ranks - 1)  # everybody meets everybody else
    again = [random_partner(0, 7, seed=3, step=step) for step in range(50)]
    assert again == [random_partner(0, 7, seed=3, step=step) for step in range(50)]
    assert again != [random_partner(0, 7, seed=4, step=step) for step in range(50)]
