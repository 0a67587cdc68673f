"""Stages balanced by measured times equal one device, and the timing has no side effects."""

from __future__ import annotations

from collections.abc import Callable

import parity
import pytest
import small_jobs
from world import World

from drumline.plans import Plan
from drumline.runtime.engine import initialize

Worlds = Callable[[int], World]


def dropped(plans: list[str]) -> list[list[float]]:
    """On every rank: the losses of two steps with dropout; `{}` in a plan is where stages began under the first."""
    results, begins = [], ""
    for plan in plans:
        engine = initialize(small_jobs.make("dropout"), plan.format(begins))
        assert engine.strategy.summary is not None
        begins = "+".join(engine.strategy.summary.stages)
        results.append([engine.step(batch) for batch in engine.data(2)])
    return results


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "pp=2,micro=3,split=measured"),
        pytest.param("gpt", "pp=2,tp=2,micro=3,split=measured", marks=pytest.mark.slow),
        pytest.param("resnet", "pp=2,micro=3,split=measured,recompute=full", marks=pytest.mark.slow),
        pytest.param("unet", "pp=2,micro=3,split=measured,schedule=zero-bubble,precision=bf16", marks=pytest.mark.slow),
    ],
)
def test_measured_stages_equal_one_device(world: Worlds, job: str, plan: str) -> None:
    """Tokens and images, statistics of norms, skips, tied weights: timing them has no side effects."""
    parity.check(world(Plan.parse(plan).ranks).run(parity.run_verify, job, plan, 3, timeout=120)[0])


def test_statistics_change_before_recomputation(world: Worlds) -> None:
    """A pipeline runs the next micro-batch through a BatchNorm before the backward of the first."""
    plan = "pp=2,micro=3,recompute=full,split=blocks.1"
    parity.check(world(2).run(parity.run_verify, "resnet", plan, 3, timeout=120)[0])


def test_timing_draws_no_random_numbers_of_the_job(world: Worlds) -> None:
    """With dropout, and stages that begin at the same place."""
    for result in world(2).run(dropped, ["pp=2,micro=2,split=measured", "pp=2,micro=2,split={}"]):
        assert result[0] == result[1]
