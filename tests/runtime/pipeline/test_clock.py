"""The measured bubble of a pipeline: from given timings, and on ranks that sleep instead of computing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sleeping_jobs
from world import World

from drumline.costs.pipeline_clock import bubble
from drumline.runtime.pipeline.clock import LaneTiming, measured_bubble, order_bubble
from drumline.schedules.pipeline import pipeline_order

Worlds = Callable[[int], World]


def test_measured_bubble() -> None:
    # two ranks, a step of 10 s in which they compute 6 and 4, then one of 20 with 12 and 12
    first = [LaneTiming(10.0, 6.0, {}), LaneTiming(20.0, 12.0, {})]
    second = [LaneTiming(7.0, 4.0, {}), LaneTiming(19.0, 12.0, {})]
    assert measured_bubble([first[:1], second[:1]]) == pytest.approx(0.5)
    assert measured_bubble([first, second]) == pytest.approx((0.5 + 0.4) / 2)
    assert measured_bubble([[], []]) is None


def test_order_bubble() -> None:
    order = pipeline_order("1f1b", 2, 4, 1)
    equal = [[LaneTiming(1.0, 1.0, {"F0": 1.0, "B0": 2.0})], [LaneTiming(1.0, 1.0, {"F1": 1.0, "B1": 2.0})]]
    assert order_bubble(order, equal) == pytest.approx(bubble("1f1b", 2, 4, 1, 1.0, 1.0, 1.0)) == pytest.approx(0.2)
    slow = [[LaneTiming(1.0, 1.0, {"F0": 1.0, "B0": 2.0})], [LaneTiming(1.0, 1.0, {"F1": 3.0, "B1": 6.0})]]
    assert order_bubble(order, slow) > 0.3  # type: ignore[operator]  # it is a number
    assert order_bubble(order, [[], []]) is None


@pytest.mark.alone
@pytest.mark.parametrize(("schedule", "wanted"), [("1f1b", 0.2), ("naive", 0.5)])
def test_bubble_of_sleeping_ranks(world: Worlds, schedule: str, wanted: float) -> None:
    """Equal stages of 4 micro-batches: a fifth of the time is lost, or with one rank at a time half of it."""
    plan = f"pp=2,micro=4,schedule={schedule}"
    result = world(2).run(sleeping_jobs.lanes, (0.01, 0.01), plan, 3)
    assert all(len(lanes) == 2 and set(lanes[0].actions) == {f"F{r}", f"B{r}"} for r, lanes in enumerate(result))
    assert all(lane.busy >= 4 * 0.03 for lanes in result for lane in lanes)
    measured = measured_bubble(result)
    alone = order_bubble(pipeline_order(schedule, 2, 4, 1), result)
    assert measured is not None and alone is not None
    assert wanted - 0.1 < measured < wanted + 0.15, result
    assert wanted - 0.05 < alone < wanted + 0.05, result
