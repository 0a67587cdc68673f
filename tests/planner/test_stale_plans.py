"""Plans whose replicas do not wait: never without being asked for, chosen for a straggler, and always with the caveat."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from drumline.clusters import Cluster, DeviceSpec, Link, Node, StepTimeDistribution, load
from drumline.costs import Estimate, cost_model
from drumline.models import Profile, zoo
from drumline.planner import Answer, search
from drumline.planner.objectives import LEAST_SAVING
from drumline.planner.stale_plans import is_stale
from drumline.plans import Plan
from drumline.plans.sync_caveats import sync_caveat

CPU = Cluster("cpu", DeviceSpec("core", "cpu", 8e9, 1e10, {"fp32": 5e10}, 5e-6), Node(4, Link(2e-5, 3e9)))
NET = zoo.profile("resnet50", batch_size=64)


def asked(profile: Profile = NET, cluster: Cluster = CPU, *slow: str, jitter: float = 0.0) -> Answer:
    here = dataclasses.replace(cluster, step_times=StepTimeDistribution.of(slow, jitter))
    answer, _ = search(profile, here, allow_stale=True)
    return answer


@pytest.mark.parametrize(
    ("slow", "cluster", "name"), [((), CPU, "resnet50"), (("3:4",), CPU, "resnet50"), ((), "dgx-h100", "gpt:1.3b")]
)
def test_exact_plans_alone_unless_asked_for(slow: tuple[str, ...], cluster: Cluster | str, name: str) -> None:
    machines = load(cluster).with_devices(4) if isinstance(cluster, str) else cluster
    machines = dataclasses.replace(machines, step_times=StepTimeDistribution.of(slow))
    answer, _ = search(zoo.profile(name, batch_size=64), machines, break_even=True)
    assert answer.stale is None and all(c.plan.sync == "allreduce" for c in answer.candidates)
    family = next(f for f in answer.families if f.name == "asynchronous")
    assert not family.plan and "--allow-stale" in family.reason


@pytest.mark.parametrize(
    ("profile", "cluster"),
    [
        (NET, CPU),
        (zoo.profile("resnet50", batch_size=256), load("dgx-h100").with_devices(8)),
        (zoo.profile("gpt:1.3b", batch_size=32), load("dgx-h100").with_devices(8)),
    ],
    ids=["cpu", "h100", "fitted"],
)
def test_even_workers_and_a_fast_link_do_not_choose_it(profile: Profile, cluster: Cluster) -> None:
    answer = asked(profile, cluster)
    verdict = answer.stale
    assert verdict is not None and not verdict.chosen and answer.best.plan.sync == "allreduce"
    assert verdict.plan and verdict.step_seconds > (1 - LEAST_SAVING) * verdict.exact_seconds
    assert verdict.sentence in answer.explanation and "are not chosen" in verdict.sentence
    assert f"would have to save {100 * LEAST_SAVING:.0f}%" in verdict.sentence and "even ranks" in verdict.sentence
    assert any(is_stale(c.plan) for c in answer.candidates), "they are priced nevertheless"
    family = next(f for f in answer.families if f.name == "asynchronous")
    assert family.plan and not family.won


@pytest.mark.parametrize("rank", [0, 3])
def test_a_straggler_chooses_it_and_names_the_caveat(rank: int) -> None:
    answer = asked(NET, CPU, f"{rank}:4")
    verdict, plan = answer.stale, answer.best.plan
    assert (
        verdict is not None and verdict.chosen and str(plan) == verdict.plan and plan.sync == "async" and plan.dp == 4
    )
    assert verdict.saving > 0.5 and verdict.staleness == 3
    assert verdict.smaller_plan.startswith("dp=3") and verdict.smaller_seconds > verdict.step_seconds
    assert "about 3 updates old" in verdict.caveat and "lower the learning rate" in verdict.caveat
    for text in (answer.explanation, verdict.sentence, answer.best.reason):
        assert verdict.caveat in text
    assert "waiting (rank" in verdict.sentence and "without the slow ranks" in verdict.sentence
    assert answer.families[-1].won


def test_leaving_slow_ranks_out_is_preferred_where_it_is_faster() -> None:
    """Between GPUs, servers are far slower than collectives: an exact plan without the straggler wins."""
    answer = asked(zoo.profile("resnet50", batch_size=256), load("dgx-h100").with_devices(4), "3:4")
    verdict = answer.stale
    assert verdict is not None and not verdict.chosen and answer.best.plan.sync == "allreduce"
    assert verdict.smaller_seconds < verdict.step_seconds < verdict.exact_seconds
    assert f"an exact plan without the slow ranks is faster: {verdict.smaller_plan}" in verdict.sentence


def test_much_jitter_chooses_it_too() -> None:
    verdict = asked(NET, CPU, jitter=0.6).stale
    assert verdict is not None and verdict.chosen and not verdict.smaller_plan and "jitter 60%" in verdict.sentence


def test_a_slow_link_chooses_local_steps() -> None:
    slow = dataclasses.replace(CPU, node=Node(4, Link(1e-3, 2e6)))
    answer = asked(NET, slow)
    assert answer.stale is not None and answer.stale.chosen and answer.best.plan.sync == "local:8"
    assert "drift apart" in answer.best.reason


def test_more_servers_are_offered_where_they_pay_off() -> None:
    slow = dataclasses.replace(CPU, node=Node(4, Link(1e-5, 2e7)))
    plans = [c.plan for c in asked(zoo.profile("resnet50", batch_size=4), slow, "3:4").candidates]
    assert any(p.sync == "async" and p.servers == 2 for p in plans)
    few = [c.plan for c in asked().candidates if c.plan.sync == "async"]
    assert [p.servers for p in few] == [1]


def test_dropped_gradients_do_not_count_as_speed() -> None:
    answer = asked(NET, CPU, "3:4")
    backup = next(c for c in answer.candidates if c.plan.backup)
    best = answer.best
    assert backup.step_seconds < best.step_seconds < backup.step_seconds * 4 / 3
    assert "do not count" in backup.reason


def test_one_device_waits_for_no_rank() -> None:
    answer = asked(NET, CPU.with_devices(1))
    assert answer.stale is not None and not answer.stale.chosen and "one replica" in answer.stale.sentence


def test_an_answer_keeps_its_verdict(tmp_path: Path) -> None:
    answer = asked(NET, CPU, "3:4")
    answer.save(tmp_path / "answer.json")
    assert Answer.load(tmp_path / "answer.json").stale == answer.stale


def test_caveats_name_what_is_given_up() -> None:
    for text, words in {
        "dp=4,sync=async": "about 3 updates old (P - 1): lower the learning rate, or use stale:k or damping=inverse",
        "dp=4,sync=async,damping=inverse": "lower the learning rate, or use stale:k",
        "dp=8,sync=stale:4": "up to 4 updates old",
        "dp=4,sync=hogwild": "overwrite each other",
        "dp=4,sync=local:8": "drift apart for 8 steps",
        "dp=4,sync=gossip": "never quite agree",
        "dp=4,sync=server,backup=1": "3/4 of its samples",
    }.items():
        assert words in sync_caveat(Plan.parse(text))
    for exact in ("dp=4", "dp=4,sync=server", "dp=4,sync=stale:0", "dp=1,sync=async"):
        assert sync_caveat(Plan.parse(exact)) == ""


def test_the_search_stays_as_it_was_without_the_flag() -> None:
    def key(e: Estimate) -> tuple[object, ...]:
        return e.plan, e.step_seconds, e.memory_bytes

    (plain, before), (same, after) = (search(NET, CPU, allow_stale=stale) for stale in (False, True))
    exact = [c.plan for c in same.candidates if c.plan.sync == "allreduce"]
    assert [c.plan for c in plain.candidates] == exact
    assert [key(before[str(p)]) for p in exact] == [key(after[str(p)]) for p in exact]


@pytest.mark.parametrize(
    ("plan", "late", "words"),
    [
        ("pp=4,schedule=pipedream", 3, "up to 3 updates old, those of the first stage"),
        ("pp=4,schedule=pipedream-2bw,micro=4", 1, "up to 1 update old, on all stages"),
        ("pp=4,micro=4", 0, ""),
    ],
)
@pytest.mark.parametrize("name", ["resnet50", "gpt:1.3b"])
def test_a_pipeline_that_does_not_drain_has_its_staleness_and_a_caveat(
    plan: str, late: int, words: str, name: str
) -> None:
    machines = CPU if name == "resnet50" else load("dgx-h100").with_devices(4)
    parsed = Plan.parse(plan)
    e = cost_model(zoo.profile(name, batch_size=64), machines, parsed.precision).estimate(parsed)
    assert e.staleness == late and words in sync_caveat(parsed) and is_stale(parsed) == bool(late)
    assert any(words in note for note in e.notes)
