"""Ranks that work while others of their host are idle, and ranks that meet."""

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
from drumline.measurement.machine import _fewer
from drumline.measurement.synchronisation import (
    ActiveRanks,
    SynchronisationCost,
    SynchronisedSteps,
    measure_partial_occupancy,
)

CPU = torch.device("cpu")


class Told:
    """Small steps that take what they are told, by how many ranks share a core."""

    def seconds(self, now: Callable[[], float]) -> list[float]:
        return [now(), 2 * now()]


def paces(crowd: float) -> dict[int, float]:
    with mock.patch.object(synchronisation, "rank_clock", lambda share: lambda: 0.5 + share):
        return {
            k: found.compute_factor for k, found in measure_partial_occupancy(find_host_groups(), Told(), crowd).items()
        }  # type: ignore[arg-type]


def test_the_pace_is_that_of_small_steps_by_their_own_clock(world: Callable[[int], World]) -> None:
    for found in world(2).run(paces, 1.0):
        assert found == pytest.approx({1: 1.0, 2: 1.0})  # a core for each: what one takes is by the wall
    for found in world(2).run(paces, 1.5):
        assert found == pytest.approx({1: (0.5 + 1.0) / (0.5 + 1.5), 2: 1.0})


def fewer(crowd: float) -> dict[int, ActiveRanks]:
    return measure_partial_occupancy(find_host_groups(), SmallSteps(crowd), crowd)


def test_ranks_are_measured_with_others_idle(world: Callable[[int], World]) -> None:
    first, second, third, fourth = world(4).run(fewer, 2.0)
    assert first.keys() == {1, 2, 4} and first[4].pace == pytest.approx(1.0)
    assert all(0.05 < found.pace < 3.0 for found in first.values())
    assert first[2].waiting == second[2].waiting and first[2].waiting is not None
    assert first[2].collectives == second[2].collectives and first[2].collectives.keys() == set(COLLECTIVES)
    assert third[2].waiting is None and not third[2].collectives and fourth[2].waiting is None
    assert first[1].waiting is None and first[4].waiting is None


def test_where_each_has_a_core_they_meet_as_among_all(world: Callable[[int], World]) -> None:
    (first, *_) = world(4).run(fewer, 1.0)
    assert all(found.waiting is None for found in first.values())


def met() -> tuple[SynchronisationCost, list[str]]:
    group = dist.group.WORLD
    assert group is not None
    meetings, kinds = SynchronisedSteps(CPU, group), []
    step = SynchronisedSteps._step

    def noted(self: SynchronisedSteps, how: str) -> float:
        kinds.append(how)
        return step(self, how)

    with mock.patch.object(SynchronisedSteps, "_step", noted):
        meetings.take()
        meetings.take()
    return meetings.cost(), kinds


def test_ranks_meet_in_turns_and_agree(world: Callable[[int], World]) -> None:
    (first, kinds), (second, _) = world(2).run(met)
    assert first == second and first.apart > 0 and first.replicated > 0 and first.stall > 0 and first.unit >= 0
    assert first.block_bytes == 4.0 * (256 * 256 * 12 + 256 * 13)  # weights, biases and norms of a block
    assert list(dict.fromkeys(kinds)) == ["apart", "after", "amid", "replicated", "sharded"]


def told(slower: list[float]) -> SynchronisationCost:
    """A machine that is slower by a factor now and then, whatever ranks do."""
    group = dist.group.WORLD
    assert group is not None
    took = {"apart": 0.010, "after": 0.011, "amid": 0.013, "replicated": 0.012, "sharded": 0.017}
    meetings = SynchronisedSteps(CPU, group)
    for factor in slower:
        with mock.patch.object(SynchronisedSteps, "_step", lambda self, how, factor=factor: factor * took[how]):
            meetings.take()
    return meetings.cost()


def test_only_steps_of_one_moment_are_compared(world: Callable[[int], World]) -> None:
    found, _ = world(2).run(told, [1.0, 3.0, 1.0 / 3.0])
    expected = SynchronisationCost(0.010, 0.012, 0.001, 0.003, 2, found.block_bytes)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected))


def test_what_was_found_as_a_part_of_a_cluster() -> None:
    points: Any = {name: [(8.0, 1e-3), (1e6, 1e-3)] for name in COLLECTIVES}
    waiting = SynchronisationCost(
        independent=0.010, replicated=0.013, mid_step_message=0.001, sharded_unit=0.005, blocks=3, block_bytes=1e5
    )
    found = _fewer(2, ActiveRanks(0.5, waiting, points), "shm")
    assert (found.compute_factor, found.mid_step_message_s) == (0.5, 0.001)
    assert (found.straggler_slowdown, found.sharded_unit_s) == pytest.approx((1.2, 0.002))
    assert found.collective[0] == CollectiveTable("all_reduce", "shm", 2, (8.0, 1e6), (1e-3, 1e-3))
    assert not _fewer(1, ActiveRanks(0.4), "shm").collective
