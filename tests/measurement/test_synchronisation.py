"""Cost of synchronisation, and ranks that are active while others of their host are idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from world import World

from drumline.clusters import CollectiveTable
from drumline.measurement import synchronisation
from drumline.measurement.in_step_slowdown import SmallSteps
from drumline.measurement.links import COLLECTIVES, find_host_groups
from drumline.measurement.machine import _partial_occupancy
from drumline.measurement.synchronisation import (
    ActiveRanks,
    SynchronisationCost,
    SynchronisedSteps,
    measure_partial_occupancy,
)

CPU = torch.device("cpu")


class FakeSteps:
    """Small steps that take the time of a given clock."""

    def seconds(self, now: Callable[[], float]) -> list[float]:
        return [now(), 2 * now()]


def compute_factors(threads_per_core: float) -> dict[int, float]:
    with mock.patch.object(synchronisation, "rank_clock", lambda share: lambda: 0.5 + share):
        return {
            k: active.compute_factor
            for k, active in measure_partial_occupancy(find_host_groups(), FakeSteps(), threads_per_core).items()
        }  # type: ignore[arg-type]


def test_compute_factor_comes_from_small_steps_by_the_ranks_clock(world: Callable[[int], World]) -> None:
    for factors in world(2).run(compute_factors, 1.0):
        assert factors == pytest.approx({1: 1.0, 2: 1.0})  # a core for each: wall time
    for factors in world(2).run(compute_factors, 1.5):
        assert factors == pytest.approx({1: (0.5 + 1.0) / (0.5 + 1.5), 2: 1.0})


def partial_occupancy(threads_per_core: float) -> dict[int, ActiveRanks]:
    return measure_partial_occupancy(find_host_groups(), SmallSteps(threads_per_core), threads_per_core)


@pytest.mark.slow
def test_ranks_are_measured_with_others_idle(world: Callable[[int], World]) -> None:
    first, second, third, fourth = world(4).run(partial_occupancy, 2.0)
    assert first.keys() == {1, 2, 4} and first[4].compute_factor == pytest.approx(1.0)
    assert all(0.05 < active.compute_factor < 3.0 for active in first.values())
    assert first[2].synchronisation == second[2].synchronisation and first[2].synchronisation is not None
    assert first[2].collectives == second[2].collectives and first[2].collectives.keys() == set(COLLECTIVES)
    assert third[2].synchronisation is None and not third[2].collectives and fourth[2].synchronisation is None
    assert first[1].synchronisation is None and first[4].synchronisation is None


def test_synchronisation_is_not_measured_if_each_rank_has_a_core(world: Callable[[int], World]) -> None:
    (first, *_) = world(4).run(partial_occupancy, 1.0)
    assert all(active.synchronisation is None for active in first.values())


def synchronised() -> tuple[SynchronisationCost, list[str]]:
    group = dist.group.WORLD
    assert group is not None
    steps, kinds = SynchronisedSteps(CPU, group), []
    step = SynchronisedSteps._step

    def noted(self: SynchronisedSteps, how: str) -> float:
        kinds.append(how)
        return step(self, how)

    with mock.patch.object(SynchronisedSteps, "_step", noted):
        steps.take()
        steps.take()
    return steps.cost(), kinds


def test_steps_are_taken_in_turns_and_ranks_agree(world: Callable[[int], World]) -> None:
    (first, kinds), (second, _) = world(2).run(synchronised)
    assert (
        first == second
        and min(first.independent, first.replicated, first.mid_step_message) > 0
        and first.sharded_unit >= 0
    )
    assert first.block_bytes == 4.0 * (256 * 256 * 12 + 256 * 13)  # weights, biases and norms of a block
    assert list(dict.fromkeys(kinds)) == ["independent", "after", "in_blocks", "replicated", "sharded"]


def with_slowdowns(slowdowns: list[float]) -> SynchronisationCost:
    """Costs on a machine whose speed changes from turn to turn."""
    group = dist.group.WORLD
    assert group is not None
    took = {"independent": 0.010, "after": 0.011, "in_blocks": 0.013, "replicated": 0.012, "sharded": 0.017}
    steps = SynchronisedSteps(CPU, group)
    for factor in slowdowns:
        with mock.patch.object(SynchronisedSteps, "_step", lambda self, how, factor=factor: factor * took[how]):
            steps.take()
    return steps.cost()


def test_only_steps_of_one_turn_are_compared(world: Callable[[int], World]) -> None:
    cost, _ = world(2).run(with_slowdowns, [1.0, 3.0, 1.0 / 3.0])
    expected = SynchronisationCost(0.010, 0.012, 0.001, 0.003, 2, cost.block_bytes)
    assert dataclasses.astuple(cost) == pytest.approx(dataclasses.astuple(expected))


def test_results_as_part_of_a_cluster() -> None:
    points: Any = {name: [(8.0, 1e-3), (1e6, 1e-3)] for name in COLLECTIVES}
    cost = SynchronisationCost(
        independent=0.010, replicated=0.013, mid_step_message=0.001, sharded_unit=0.005, blocks=3, block_bytes=1e5
    )
    occupancy = _partial_occupancy(2, ActiveRanks(0.5, cost, points), "shm")
    assert (occupancy.compute_factor, occupancy.mid_step_message_s) == (0.5, 0.001)
    assert (occupancy.straggler_slowdown, occupancy.sharded_unit_s) == pytest.approx((1.2, 0.002))
    assert occupancy.collective[0] == CollectiveTable("all_reduce", "shm", 2, (8.0, 1e6), (1e-3, 1e-3))
    assert not _partial_occupancy(1, ActiveRanks(0.4), "shm").collective
