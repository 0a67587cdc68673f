"""Ties: of plans that the cost model cannot distinguish, the simplest is proposed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumline.clusters import load
from drumline.costs import Estimate
from drumline.costs.tuning import MEASURED_ERROR, UNMEASURED_ERROR
from drumline.models import zoo
from drumline.planner import search
from drumline.planner.objectives import TIE, UNMEASURED_TIE, complexity, simplest_first, tie_width
from drumline.plans import Plan

EIGHT = load("dgx-h100").with_devices(8)
PROFILE = zoo.profile("mlp:2x256", batch_size=64)


def timed(plan: Plan, plans: list[Plan], times: list[float]) -> Estimate:
    """An estimate with the given time, or a long one."""
    known = {replace(p, precision="bf16"): seconds for p, seconds in zip(plans, times, strict=True)}
    parts = {"forward": known.get(plan, 9.0)}
    return Estimate(str(plan), parts["forward"], parts, 1.0, {"parameters": 1.0}, 1e9)


def first(*plans: tuple[str, float], objective: str = "time") -> str:
    values = [(Plan.parse(text), value) for text, value in plans]
    order = simplest_first(values, objective)
    assert sorted(order) == list(range(len(plans))) and order[1:] == sorted(order[1:])
    return str(values[order[0]][0])


@pytest.mark.parametrize(
    ("simple", "other"),
    [
        ("dp=8", "dp=8,zero=1"),
        ("dp=8", "dp=8,micro=2"),
        ("dp=8,zero=3", "dp=4,tp=2"),
        ("dp=8,micro=2", "dp=8,zero=1"),
        ("dp=8,zero=3", "dp=8,shard=4,zero=3"),
        ("dp=8,zero=3,micro=2", "dp=8,zero=3,recompute=selective"),
        ("dp=8,zero=3,recompute=full", "dp=8,zero=3,offload=all"),
        ("dp=8,recompute=selective", "dp=8,recompute=full"),
        ("pp=2,micro=4", "pp=2,micro=4,schedule=zero-bubble"),
        ("dp=2,tp=4", "dp=2,tp=2,pp=2,micro=2"),
        ("dp=8", "dp=8,graph=true"),
    ],
)
def test_simpler(simple: str, other: str) -> None:
    assert complexity(Plan.parse(simple)) < complexity(Plan.parse(other))
    assert first((other, 1.0), (simple, 1 + 0.99 * TIE)) == str(Plan.parse(simple))
    assert first((other, 1.0), (simple, 1 + 1.01 * TIE)) == str(Plan.parse(other))
    assert first((simple, 1.0), (other, 1.001)) == str(Plan.parse(simple))


def test_no_device_is_left_idle_for_a_tie() -> None:
    assert first(("dp=8,zero=1", 1.0), ("dp=4", 1.001)) == "dp=8,zero=1"
    assert first(("dp=7,zero=1", 1.0), ("dp=8", 1.001)) == "dp=8"
    assert first(("dp=7,zero=1", 1.0), ("dp=8", 1.001), objective="cost") == "dp=7,zero=1"


def test_memory_is_counted_and_approximate_plans_do_not_tie() -> None:
    assert first(("dp=8,zero=3", 1.0), ("dp=8", 1.001), objective="memory") == "dp=8,zero=3"
    assert first(("dp=8,zero=1", 1.0), ("dp=8,sync=async", 1.001)) == "dp=8,zero=1"
    assert simplest_first([]) == []


@pytest.mark.parametrize(
    ("name", "batch", "plan", "cluster"),
    [
        ("resnet50", 256, "dp=8", "dgx-h100"),
        ("resnet50", 128, "dp=8", "dgx-h100"),
        ("unet", 64, "dp=8", "dgx-h100"),
        ("lstm:2x1024", 256, "dp=8", "dgx-h100"),
        ("bert:large", 256, "dp=8", "dgx-a100"),
        ("bert:base", 64, "dp=8", "dgx-h100"),
        ("vit:base", 256, "dp=8", "dgx-h100"),
        ("gpt:1.3b", 512, "dp=8,micro=8", "dgx-h100"),
    ],
)
def test_what_an_expert_would_run(name: str, batch: int, plan: str, cluster: str) -> None:
    """By price alone some are `zero=3` or `tp=2`, which an expert would not run for a model this small."""
    answer, _ = search(zoo.profile(name, batch_size=batch), load(cluster).with_devices(8))
    assert str(answer.best.plan) == f"{plan},precision=bf16"
    assert not answer.best.tie


@pytest.mark.parametrize("brief", [True, False])
@pytest.mark.parametrize("objective", ["time", "cost"])
def test_the_table_names_ties(objective: str, brief: bool) -> None:
    answer, _ = search(zoo.profile("gpt:7b", batch_size=512), EIGHT.with_devices(8), objective=objective, brief=brief)
    fitting = [c for c in answer.candidates if c.fits and not c.in_reserve]

    def cost(step_seconds: float, ranks: int) -> float:
        return step_seconds * (ranks if objective == "cost" else 1)

    best = cost(answer.best.step_seconds, answer.best.plan.ranks)
    least = min(cost(c.step_seconds, c.plan.ranks) for c in fitting)
    assert not answer.best.tie and best <= (1 + TIE) * least
    for c in fitting[1:]:
        near = cost(c.step_seconds, c.plan.ranks) <= (1 + TIE) * least
        assert c.tie == c.reason.startswith("tie: ") == near, c


def test_ties_are_counted_and_labelled_from_the_fastest() -> None:
    """A plan within 2% of the proposed plan, but not of the fastest, is no tie: it was not among those counted."""
    plans = [Plan.parse(text) for text in ("dp=8,zero=3", "dp=8,tp=1,zero=2", "dp=8")]
    times = [1.0, 1.015, 1.03]
    answer, _ = search(PROFILE, EIGHT, score=lambda _, plan, __: timed(plan, plans, times))
    rows = {c.plan: c for c in answer.candidates if c.plan in [replace(p, precision="bf16") for p in plans]}
    fastest, proposed, plain = (rows[replace(p, precision="bf16")] for p in plans)
    assert answer.best is proposed and proposed.reason == "simplest of 2 plans within 2% of the best"
    assert fastest.tie and not plain.tie and "slower" in plain.reason and not plain.reason.startswith("tie")


def test_prices_by_data_sheet_have_wider_ties() -> None:
    assert tie_width(UNMEASURED_ERROR) == UNMEASURED_TIE == 0.05
    assert tie_width(MEASURED_ERROR) == tie_width(0.158) == TIE


def test_brief_and_full_searches_agree() -> None:
    for name, batch in (("gpt:7b", 512), ("gpt:1.3b", 64), ("llama:8b", 128)):
        profile = zoo.profile(name, batch_size=batch)
        assert search(profile, EIGHT)[0].best.plan == search(profile, EIGHT, brief=True)[0].best.plan


def test_the_explanation_names_the_tie() -> None:
    answer, _ = search(zoo.profile("bert:large", batch_size=256), load("dgx-a100").with_devices(8))
    assert answer.best.reason.startswith("simplest of ") and answer.best.reason.endswith(" plans within 5% of the best")
    assert "plans whose time the cost model cannot distinguish (5%): dp=8,zero=3" in answer.explanation
