"""The search: its candidates, its ranking, its answer when nothing fits, and a given plan."""

from __future__ import annotations

import dataclasses
import json

import pytest

from drumline.clusters import load
from drumline.core.errors import DoesNotFit
from drumline.costs import cost_model
from drumline.models import zoo
from drumline.planner import Answer, price, search
from drumline.planner.objectives import TIE
from drumline.planner.space import candidates
from drumline.plans import Plan
from drumline.plans.combinations import refusal

FOUR = load("dgx-h100").with_devices(4)


def test_candidates_are_plans_that_the_engine_runs() -> None:
    plans = list(
        candidates(zoo.profile("gpt:1.3b", batch_size=32), load("dgx-h100").with_devices(8), Plan(precision="bf16"))
    )
    assert len(plans) == len(set(plans)) > 50
    assert not [p for p in plans if refusal(p)]
    assert all(p.dp * p.micro <= 32 and p.ranks <= 8 for p in plans)
    assert {p.dp for p in plans} == set(range(1, 9))  # devices may stay idle


def test_recomputation_only_where_there_are_blocks() -> None:
    profile = zoo.profile("mlp:4x4096")
    flat = dataclasses.replace(profile, layers=tuple(dataclasses.replace(x, composite=False) for x in profile.layers))
    assert {p.recompute for p in candidates(profile, FOUR, Plan())} == {"none", "selective", "full"}
    assert {p.recompute for p in candidates(flat, FOUR, Plan())} == {"none"}


def test_best_first_each_loser_with_its_reason() -> None:
    answer, estimates = search(zoo.profile("gpt:7b"), load("dgx-h100").with_devices(64))
    fitting = [c for c in answer.candidates if c.fits and not c.in_reserve]
    tight = [c for c in answer.candidates if c.in_reserve]
    others = [c for c in answer.candidates if not c.fits]
    assert answer.candidates == (*fitting, *tight, *others)
    for rows in (fitting[1:], tight):
        assert [c.step_seconds for c in rows] == sorted(c.step_seconds for c in rows)
    ties = sum(c.step_seconds <= (1 + TIE) * min(c.step_seconds for c in fitting) for c in fitting)
    assert fitting[0].reason == f"simplest of {ties} plans within 2% of the best" and ties > 1
    assert all("slower: " in c.reason or (c.tie and c.reason.startswith("tie: ")) for c in fitting[1:])
    assert all(c.reason.startswith("fits only into the reserve: ") for c in tight) and tight
    assert all("exceeds device memory by" in c.reason for c in others) and others
    assert set(estimates) == {str(c.plan) for c in answer.candidates}
    assert str(fitting[0].plan) in answer.explanation and "is hidden behind compute" in answer.explanation


def test_small_work_is_fastest_on_one_rank() -> None:
    slow = load("dgx-h100").with_devices(2)
    slow = dataclasses.replace(
        slow, node=dataclasses.replace(slow.node, link=dataclasses.replace(slow.node.link, alpha=0.1))
    )
    answer, _ = search(zoo.profile("mlp:2x256"), slow)
    assert str(answer.best.plan).startswith("dp=1")


@pytest.mark.parametrize(
    ("name", "cluster", "devices"),
    [
        ("gpt:175b", "dgx-a100", 8),
        pytest.param("gpt:530b", "dgx-h100", 8, marks=pytest.mark.slow),
    ],
)
def test_nothing_fits(name: str, cluster: str, devices: int) -> None:
    """The suggested number of devices is enough, and half of it is not."""
    fleet, profile = load(cluster), zoo.profile(name, batch_size=64)
    with pytest.raises(DoesNotFit) as caught:
        search(profile, fleet.with_devices(devices), fleet=fleet)
    assert " > " in caught.value.rule and "needs the least" in caught.value.rule and "offload=" in caught.value.rule
    assert caught.value.fix.startswith("--devices")
    enough = int(caught.value.fix.split()[1].rstrip(":"))
    search(profile, fleet.with_devices(enough))
    with pytest.raises(DoesNotFit):
        search(profile, fleet.with_devices(enough // 2))


def test_no_number_of_devices_helps() -> None:
    with pytest.raises(DoesNotFit) as caught:
        search(zoo.profile("gpt:1t"), load("one-a100"))
    assert "hosts with" in caught.value.fix or "devices with" in caught.value.fix


def test_a_scorer_can_be_passed_in() -> None:
    from drumline.costs import estimate

    seen = []

    def score(profile, plan, cluster):  # type: ignore[no-untyped-def]
        seen.append(plan)
        return estimate(profile, plan, cluster)

    answer, _ = search(zoo.profile("resnet50"), load("dgx-a100").with_devices(4), score=score)
    assert len(seen) == len(answer.candidates)


def test_answer_round_trip(tmp_path) -> None:  # type: ignore[no-untyped-def]
    answer, _ = search(zoo.profile("resnet50"), load("dgx-a100").with_devices(2))
    answer.save(tmp_path / "a.json")
    assert Answer.load(tmp_path / "a.json") == answer
    table = json.loads((tmp_path / "a.json").read_text())
    assert table["candidates"][0]["plan"] == str(answer.best.plan), "files have the notation"


def test_a_given_plan_is_priced_without_a_search() -> None:
    profile, cluster = zoo.profile("gpt:7b", batch_size=64), load("dgx-h100").with_devices(8)
    plan = Plan.parse("dp=4,tp=2,zero=1,precision=bf16")
    e = price(profile, cluster, plan)
    assert e.plan == str(plan) and e == cost_model(profile, cluster, "bf16").estimate(plan)
