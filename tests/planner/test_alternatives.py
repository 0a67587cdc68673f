"""Plan families, bottlenecks, break-even points, objectives, the Pareto front, Ctrl-C, and limits of the space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from drumline.clusters import Cluster, load
from drumline.core.errors import InputError
from drumline.costs import Estimate, OperatorCostModel, cost_model, estimate
from drumline.models import Profile, zoo
from drumline.planner import search
from drumline.planner.bottlenecks import bottlenecks
from drumline.planner.break_even import link_thresholds, thresholds, with_slower_messages
from drumline.planner.explain import reason
from drumline.planner.formula import formula
from drumline.planner.objectives import OBJECTIVES, pareto
from drumline.planner.plan_families import FAMILIES, families_of, why_absent
from drumline.planner.space import SearchSpace, candidates, split_candidates
from drumline.plans import Plan
from drumline.plans.combinations import check, refusal

EIGHT = load("dgx-h100").with_devices(8)
GPT = zoo.profile("gpt:7b", batch_size=32)
BASE = Plan(precision="bf16")


def split_plans(profile: Profile, cluster: Cluster) -> list[Plan]:
    model = OperatorCostModel(profile, cluster, "bf16")
    return list(split_candidates(SearchSpace(profile, cluster, BASE, model), BASE, model.fits))


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("dp=1", ["one device"]),
        ("dp=4", ["data"]),
        ("dp=4,zero=2", ["sharded"]),
        ("dp=4,tp=2,zero=1", ["tensor"]),
        ("tp=2,pp=2,micro=4", ["tensor", "pipeline"]),
        ("cp=2", ["context"]),
        ("tile=2x1", ["tiles"]),
        ("dp=8,zero=3,offload=all", ["offload"]),
        ("zero=3,offload=all,chunk=4", ["offload", "chunk"]),
        ("dp=8,zero=3,chunk=4", ["sharded", "chunk"]),
    ],
)
def test_families(plan: str, names: list[str]) -> None:
    assert list(families_of(Plan.parse(plan))) == names and set(names) <= set(FAMILIES)


def test_every_family_has_a_row() -> None:
    answer, estimates = search(GPT, EIGHT)
    rows = {f.name: f for f in answer.families}
    assert list(rows) == list(FAMILIES)
    assert rows["sharded"].won and rows["sharded"].plan == str(answer.best.plan)
    for f in answer.families:
        if not f.plan:
            assert f.reason and not f.fits
            continue
        e = estimates[f.plan]
        assert f.slower == pytest.approx(e.step_seconds / answer.candidates[0].step_seconds - 1)
        assert (f.lacks_bytes == 0) == f.fits and f.lacks_bytes == pytest.approx(e.lacks[1])
        same = [c for c in answer.candidates if f.name in families_of(c.plan)]
        assert str(same[0].plan) == f.plan, "it is the best of its family"
    assert "exceeds device memory by" in rows["data"].reason and rows["data"].lacks_bytes > 0
    assert "2048 tokens per sample < 2 x 4096" in rows["context"].reason


def test_why_a_family_is_absent() -> None:
    one = load("one-a100")
    hostless = replace(one, device=replace(one.device, host=None))
    assert why_absent("tensor", GPT, one) == "there is only one device"
    assert "host is not described" in why_absent("offload", GPT, hostless)
    assert "CPU already keeps everything" in why_absent(
        "offload", GPT, replace(one, device=replace(one.device, kind="cpu"))
    )
    assert "no convolutions" in why_absent("tiles", GPT, EIGHT)
    assert "not sequences" in why_absent("context", zoo.profile("resnet50"), EIGHT)
    assert "no sample for a second replica" in why_absent("data", replace(GPT, batch_size=1), EIGHT)


def test_bottlenecks() -> None:
    plan = Plan.parse("dp=8,zero=3,micro=2,precision=bf16")
    result = bottlenecks(GPT, plan, estimate(GPT, plan, EIGHT), EIGHT)
    assert sum(result.shares.values()) == pytest.approx(1) and result.first == "products"
    assert 0.35 < result.utilisation < 0.6
    slow = with_slower_messages(EIGHT, 100)
    assert bottlenecks(GPT, plan, estimate(GPT, plan, slow), slow).first == "communication"
    tiny, one = zoo.profile("mlp:2x256", batch_size=1), load("one-a100")
    plan = Plan.parse("precision=bf16")
    assert bottlenecks(tiny, plan, estimate(tiny, plan, one), one).first in ("launches", "optimizer", "overhead")


def test_thresholds_separate_the_winners() -> None:
    """A search on either side of the threshold confirms which family wins."""
    profile = zoo.profile("gpt:1.3b", batch_size=32)
    answer, estimates = search(profile, EIGHT, break_even=True)
    ranked = [(c.plan, estimates[str(c.plan)]) for c in answer.candidates]
    links = [c for c in thresholds(profile, EIGHT, ranked) if c.key == "node.link.bandwidth"]
    assert links, "with slower links another family wins"
    for c in links:
        assert c.below and c.value < EIGHT.node.link.bandwidth
        past, before = (
            families_of(search(profile, at(EIGHT, c.value * f), brief=True)[0].best.plan) for f in (0.93, 1.07)
        )
        assert c.family in past and c.family not in before
    family = next(f for f in answer.families if f.name == links[0].family)
    assert any("link inside a node is slower than" in change for change in family.wins_if)
    assert f"{family.name} " in answer.explanation.partition("Other families become the fastest: ")[2]


def at(cluster: Cluster, bandwidth: float) -> Cluster:
    return replace(cluster, node=replace(cluster.node, link=replace(cluster.node.link, bandwidth=bandwidth)))


def test_break_even_of_two_plans() -> None:
    profile = zoo.profile("gpt:1.3b", batch_size=32)
    fast, frugal = Plan.parse("dp=8,zero=3,precision=bf16"), Plan.parse("pp=8,micro=32,precision=bf16")
    (threshold,) = link_thresholds(profile, EIGHT, fast, frugal)
    assert threshold.below and threshold.key == "node.link.bandwidth" and threshold.plan == str(frugal)
    for factor, ahead in ((0.95, True), (1.05, False)):
        model = cost_model(profile, at(EIGHT, threshold.value * factor), "bf16")
        first, second = (model.estimate(p).step_seconds for p in (fast, frugal))
        assert (second < first) is ahead
    assert link_thresholds(profile, EIGHT, fast, Plan.parse("dp=8,zero=3,micro=2,recompute=full,precision=bf16")) == []


def test_memory_thresholds() -> None:
    answer, estimates = search(GPT, EIGHT)
    ranked = [(c.plan, estimates[str(c.plan)]) for c in answer.candidates]
    memory = [c for c in thresholds(GPT, EIGHT, ranked) if c.key == "device.memory"]
    assert memory
    for c in memory:
        low, high = sorted((c.value, c.until or 2 * c.value))
        assert low < high and "per device" in str(c)
        middle = EIGHT.with_memory((low + high) / 2)
        best, _ = search(GPT, middle, brief=True)
        assert c.family in families_of(best.best.plan), (c, best.candidates[0])


def test_objectives() -> None:
    four = EIGHT.with_devices(4)
    answers = {o: search(GPT, four, objective=o)[0] for o in OBJECTIVES}
    first = {o: a.candidates[0] for o, a in answers.items()}
    assert first["time"].reason == "fastest plan that fits" and first["memory"].reason == "needs the least memory"
    assert first["memory"].memory_bytes < first["time"].memory_bytes
    assert first["memory"].memory_bytes == min(c.memory_bytes for c in answers["memory"].candidates if c.fits)
    cost = {c.plan: c.step_seconds * c.plan.ranks for c in answers["cost"].candidates if c.fits}
    assert first["cost"].plan == min(cost, key=lambda p: cost[p])
    assert "device hours" in answers["cost"].candidates[1].reason
    with pytest.raises(InputError, match="--objective tiem"):
        search(GPT, four, objective="tiem")


def test_equally_fast_plans_are_compared_by_complexity() -> None:
    """Differences below 0.1% do not count; the simpler plan is pointed out."""
    plain, sharded = Plan.parse("dp=8,micro=2"), Plan.parse("dp=8,shard=4,zero=3,micro=2")
    best = estimate(GPT, sharded, EIGHT)
    near = replace(best, plan=str(plain), step_seconds=best.step_seconds * 1.0001)
    assert reason(near, best, plain) == "tie: as fast, and simpler"
    other = reason(replace(near, plan=str(sharded)), replace(best, plan=str(plain)), sharded)
    assert other == "tie: as fast, but less simple"


def test_pareto() -> None:
    answer, estimates = search(GPT, EIGHT)
    scored = [(c.plan, estimates[str(c.plan)]) for c in answer.candidates]
    front = pareto(scored)
    assert front[0][0] == scored[0][0] and len(front) > 3
    for _, e in front:
        assert not any(
            x.fits
            and x.step_seconds <= e.step_seconds
            and x.memory_bytes <= e.memory_bytes
            and (x.step_seconds, x.memory_bytes) != (e.step_seconds, e.memory_bytes)
            for _, x in scored
        )
    points = {(e.step_seconds, e.memory_bytes) for _, e in front}
    for _, x in scored:
        beaten = any(t <= x.step_seconds and m <= x.memory_bytes for t, m in points)
        assert beaten or not x.fits, "plans off the front are beaten by it"


def test_formula_adds_up() -> None:
    for text in ("dp=8,zero=3,micro=2", "dp=8,zero=1", "dp=4,tp=2,zero=1", "pp=8,micro=16", "dp=8", "dp=1"):
        plan = Plan.parse(text + ",precision=bf16")
        e = estimate(GPT, plan, EIGHT)
        terms = formula(GPT, plan, e, EIGHT)
        assert terms[0].value == e.step_seconds and str(terms[0]).startswith("step = forward ")
        named = {t.name: t for t in terms}
        assert sum(named[k].value for k, v in e.parts.items() if v) == pytest.approx(e.step_seconds)
        assert named["memory"].value == e.memory_bytes and "samples" in named["forward"].formula
        assert all(t.formula for t in terms)
    gathers = 2 * 2 * 33  # forward and backward of two micro-batches, 32 blocks and the rest
    plan = Plan.parse("dp=8,zero=3,micro=2,precision=bf16")
    sent = next(t for t in formula(GPT, plan, estimate(GPT, plan, EIGHT), EIGHT) if t.name == "all_gather")
    assert f"{gathers // 33} x 33 messages" in sent.formula and "(p-1)/p m beta" in sent.formula


def test_an_interrupted_search_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = search(GPT, EIGHT, brief=True)
    seen: list[Plan] = []

    def score(profile: Profile, plan: Plan, cluster: Cluster) -> Estimate:
        if len(seen) == 60:
            raise KeyboardInterrupt
        seen.append(plan)
        return estimate(profile, plan, cluster)

    answer, _ = search(GPT, EIGHT, score=score)
    assert answer.interrupted and not whole.interrupted
    assert {c.plan for c in answer.candidates} == set(seen) and len(seen) == 60
    assert answer.candidates[0].fits and answer.explanation
    assert answer.best.plan.ranks == 8, "plans that use the whole machine come first"


def test_interrupted_before_anything_fits() -> None:
    def score(profile: Profile, plan: Plan, cluster: Cluster) -> Estimate:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(GPT, EIGHT, score=score)


PROFILES = ("gpt:125m", "bert:base", "resnet50", "unet", "vit:base", "lstm:2x1024", "mlp:4x4096", "llama:8b")


@pytest.mark.parametrize("name", PROFILES)
def test_plans_that_the_engine_refuses_are_no_candidates(name: str) -> None:
    for cluster, batch in ((load("dgx-h100").with_devices(16), 24), (load("dgx-a100").with_devices(7), 12)):
        profile = zoo.profile(name, batch_size=batch)
        for save_memory in (False, True):
            plans = list(candidates(profile, cluster, BASE, save_memory=save_memory))
            assert len(plans) == len(set(plans)) > 20
            for plan in plans:
                assert not refusal(plan), plan
                check(plan)
                assert plan.ranks <= cluster.devices and plan.dp * plan.micro <= batch


def groups(plan: Plan) -> Iterator[range]:
    """Groups of ranks that share a layer."""
    inner = plan.tp * plan.cp * plan.tile[0] * plan.tile[1]
    return (range(i, i + inner) for i in range(0, plan.ranks, inner))


def test_ranks_that_share_a_layer_share_a_node() -> None:
    six = load("dgx-h100").with_devices(16)
    six = replace(six, node=replace(six.node, devices=6))
    plans = split_plans(zoo.profile("gpt:1.3b", batch_size=24), six)
    assert {p.tp for p in plans} >= {1, 2}
    for plan in plans:
        assert all(len({r // 6 for r in ranks}) == 1 for ranks in groups(plan)), plan


def test_stages_with_a_tied_embedding_can_be_priced() -> None:
    """An embedding that tp leaves whole and two stages read is counted once."""
    profile, machines = zoo.profile("gpt:125m", batch_size=24), load("dgx-h100").with_devices(24)
    steps = OperatorCostModel(profile, machines, "bf16")
    plans = split_plans(profile, machines)
    assert any(p.tp > 1 and p.pp > 1 for p in plans)
    assert all(steps.estimate(p).step_seconds > 0 for p in plans)


def with_latency(cluster: Cluster) -> Cluster:
    return replace(cluster, node=replace(cluster.node, link=replace(cluster.node.link, alpha=1e-3)))


def test_split_models_recompute_only_where_they_do_not_fit() -> None:
    tight = EIGHT.with_memory(20 * 2**30)
    plans = split_plans(GPT, tight)
    fits = OperatorCostModel(GPT, tight, "bf16").fits
    recomputed = [p for p in plans if p.recompute == "full"]
    assert recomputed and not any(fits(replace(p, recompute="none")) for p in recomputed)
    assert any(fits(p) for p in recomputed), "it helps"
    assert {p.recompute for p in split_plans(GPT, EIGHT.with_memory(2**41))} == {"none"}


def test_devices_that_do_not_divide_stay_idle() -> None:
    seven = load("dgx-h100").with_devices(7)
    meshes = {(p.dp, p.tp, p.pp) for p in split_plans(zoo.profile("gpt:1.3b", batch_size=24), seven)}
    assert (3, 2, 1) in meshes and (1, 4, 1) in meshes
    answer, _ = search(zoo.profile("mlp:2x256", batch_size=4), with_latency(seven))
    assert str(answer.best.plan).startswith("dp=1") and "6 of 7 devices stay idle: on " in answer.explanation
