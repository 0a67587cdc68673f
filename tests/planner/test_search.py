"""The search: what it offers, how it ranks, what it says when nothing fits."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.clusters import load
from drumline.core.errors import DoesNotFit
from drumline.models import zoo
from drumline.planner import Answer, search
from drumline.planner.space import candidates
from drumline.plans import Plan
from drumline.plans.combinations import refusal

FOUR = load("dgx-h100").with_devices(4)


def test_only_what_the_engine_runs_is_offered() -> None:
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
    fitting = [c for c in answer.candidates if c.fits]
    others = [c for c in answer.candidates if not c.fits]
    assert answer.candidates[: len(fitting)] == tuple(fitting)
    assert [c.step_seconds for c in fitting] == sorted(c.step_seconds for c in fitting)
    assert fitting[0].reason == "fastest that fits"
    assert all("slower: " in c.reason or "as fast" in c.reason for c in fitting[1:])
    assert all("more than there is" in c.reason for c in others) and others
    assert set(estimates) == {c.plan for c in answer.candidates}
    assert str(fitting[0].plan) in answer.explanation and "hides behind computation" in answer.explanation


def test_light_work_wins_on_one_rank() -> None:
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
    """What is named as the way out does help, and half of it does not."""
    fleet, profile = load(cluster), zoo.profile(name, batch_size=64)
    with pytest.raises(DoesNotFit) as caught:
        search(profile, fleet.with_devices(devices), fleet=fleet)
    assert " > " in caught.value.rule and "needs least" in caught.value.rule and "offload=" in caught.value.rule
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


def test_answer_file_form(tmp_path) -> None:  # type: ignore[no-untyped-def]
    answer, _ = search(zoo.profile("resnet50"), load("dgx-a100").with_devices(2))
    answer.save(tmp_path / "a.json")
    assert Answer.load(tmp_path / "a.json") == answer
