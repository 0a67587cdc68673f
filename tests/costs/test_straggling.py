"""Ranks that differ and meet in every step: the clock of the schedule decides what a slow stage costs."""

from __future__ import annotations

import dataclasses
from itertools import islice

import numpy as np
import pytest

import drumline as dl
from drumline.clusters import Cluster, StepTimeDistribution, load
from drumline.costs import OperatorCostModel, cost_model, estimate
from drumline.costs.fitted.approximate_stragglers import approximate_slowdown
from drumline.costs.model import CostModel
from drumline.costs.pipeline_clock import time_pipeline
from drumline.costs.plan_columns import PlanColumns
from drumline.costs.straggling import slowed_step, slowest_of_stages
from drumline.models import zoo
from drumline.plans import Plan
from drumline.schedules import pipeline_order

H100 = load("dgx-h100")
GPT = zoo.profile("gpt:1.3b", batch_size=64)
SCHEDULES = (
    "pp=4,micro=8",
    "pp=4,micro=8,schedule=gpipe",
    "pp=4,micro=4,schedule=naive",
    "pp=4,micro=8,virtual=2,schedule=interleaved",
    "pp=4,micro=8,schedule=zero-bubble",
    "pp=4,schedule=pipedream",
    "pp=4,micro=4,schedule=pipedream-2bw",
)


def uneven(ranks: int, *slow: str, jitter: float = 0.0) -> Cluster:
    return dataclasses.replace(H100.with_devices(ranks), step_times=StepTimeDistribution.of(slow, jitter))


def model_of(make: type[OperatorCostModel], ranks: int, *slow: str, jitter: float = 0.0) -> CostModel:
    return make(GPT, uneven(ranks, *slow, jitter=jitter), "bf16")


@pytest.mark.parametrize("stage", range(4))
def test_a_slow_stage_costs_what_the_clock_says(stage: int) -> None:
    plan = Plan.parse("pp=4,micro=8,precision=bf16")
    even = OperatorCostModel(GPT, uneven(4), "bf16").step(plan)
    assert even.pipeline is not None

    def passes(factors: list[float]) -> float:
        cost = even.pipeline
        assert cost is not None
        forward, backward = (
            [f * s for f, s in zip(factors, own, strict=True)] for own in (cost.forward, cost.backward)
        )
        order = pipeline_order("1f1b", 4, 8, 1)
        return time_pipeline(order, forward=forward, backward=backward, transfer=cost.transfer).seconds

    factors = [2.0 if s == stage else 1.0 for s in range(4)]
    expected = passes(factors) / passes([1.0] * 4)
    assert 1.3 < expected < 1.8
    for make in (OperatorCostModel, cost_model):
        plain, slow = (make(GPT, uneven(4, *own), "bf16").estimate(plan) for own in ([], [f"{stage}:2"]))
        assert slow.step_seconds / plain.step_seconds == pytest.approx(expected, rel=0.02)
        assert slow.parts["waiting"] == pytest.approx(slow.step_seconds - plain.step_seconds)


def test_equal_stages() -> None:
    """Forward 1, backward 2: the first of four stages hides some of its time, the last one none."""
    for p, stage, expected in ((4, 0, 51 / 33), (4, 3, 57 / 33), (8, 0, 55 / 45)):
        order, own = pipeline_order("1f1b", p, 8, 1), np.ones(p)
        even = time_pipeline(order, forward=1.0, backward=2.0).seconds
        own[stage] = 2.0
        slow = time_pipeline(order, forward=tuple(own), backward=tuple(2 * own)).seconds
        assert slow / even == pytest.approx(expected)
        assert approximate_slowdown(list(own), 2.0, np.array([8.0]))[0] == pytest.approx(expected)


def test_the_slowest_rank_of_a_stage_decides() -> None:
    plan = Plan.parse("pp=2,dp=2,tp=2,micro=4,precision=bf16")

    def seconds(*slow: str) -> float:
        return estimate(GPT, plan, uneven(8, *slow)).step_seconds

    assert seconds("4:2") == seconds("7:2") == seconds("4:1.5", "6:2") == seconds("4-7:2")
    assert seconds("4:2", "0:2") == seconds("0-7:2") > seconds("4:2") > seconds()
    assert seconds("0-7:0.5") < seconds()
    assert slowest_of_stages([1, 3, 2, 1], 2) == [3, 2] and slowest_of_stages([1, 3, 2, 1], 1) == [3]


@pytest.mark.parametrize("text", [*SCHEDULES, "dp=4", "dp=4,zero=3", "dp=2,pp=2,micro=4"])
def test_estimate_replay_timeline_and_memory_have_one_clock(text: str) -> None:
    for profile in (GPT, zoo.profile("resnet50", batch_size=64)):
        if profile is not GPT and "virtual" in text:
            continue
        even = dl.simulate(profile, f"{text},precision=bf16", H100)
        slow = dl.simulate(profile, f"{text},precision=bf16", H100, slow={3: 2.0})
        assert slow.planned_seconds == pytest.approx(slow.step_seconds, rel=1e-9)
        assert even.step_seconds < slow.step_seconds <= 2 * even.step_seconds * (1 + 1e-9)
        assert slow.estimate is not None and sum(slow.estimate.parts.values()) == pytest.approx(slow.step_seconds)
        assert slow.timeline.seconds == pytest.approx(slow.step_seconds, rel=1e-9)
        assert all(m.times[-1] == pytest.approx(slow.step_seconds, rel=1e-9) for m in slow.memory)
        assert [m.peak for m in slow.memory] == pytest.approx([m.peak for m in even.memory])
        assert slow.workers is not None and slow.workers.slowest == 3


@pytest.mark.parametrize("text", ["dp=8", "dp=2,pp=4,micro=8"])
def test_jitter_is_drawn_by_rank_and_step(text: str) -> None:
    jitter = dl.simulate(GPT, f"{text},precision=bf16", H100, jitter=0.1, seed=3)
    even = dl.simulate(GPT, f"{text},precision=bf16", H100)
    assert jitter.planned_seconds == pytest.approx(jitter.step_seconds, rel=0.02)
    assert jitter.timeline.seconds == pytest.approx(jitter.step_seconds, rel=1e-9)
    assert all(m.times[-1] == pytest.approx(jitter.step_seconds, rel=1e-9) for m in jitter.memory)
    plan, cluster = Plan.parse(f"{text},precision=bf16"), uneven(8, jitter=0.1)
    step = OperatorCostModel(GPT, cluster, "bf16").step(plan)
    draws = islice(zip(*cluster.step_times.all_draws(8), strict=True), 100)
    mean = sum(slowed_step(step, slowest_of_stages(own, plan.pp)).seconds for own in draws) / 100
    assert jitter.step_seconds / even.step_seconds == pytest.approx(mean / step.seconds, rel=0.03)


def test_a_slow_rank_changes_which_plan_is_found() -> None:
    """Scores of whole spaces are near the estimates, which a search then takes."""
    model = cost_model(GPT, uneven(8, "0:2"), "bf16")
    plans = [Plan.parse(f"{x},precision=bf16") for x in ("dp=8", "pp=8,micro=8", "dp=2,pp=4,micro=16", "dp=4,tp=2")]
    scores = model.score(PlanColumns.from_plans(plans)).seconds
    assert list(scores) == pytest.approx(model.seconds(plans), rel=0.15)
    assert model.seconds(plans) == [model.estimate(p).step_seconds for p in plans]
