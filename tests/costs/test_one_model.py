"""One cost model: the estimate adds up the same step that the simulator draws, for every kind of plan."""

from __future__ import annotations

import pytest

from drumline.clusters import Cluster, DeviceSpec, Link, Node, load
from drumline.costs import CostModel, OperatorCostModel, cost_model
from drumline.models import Profile, zoo
from drumline.plans import Plan, check
from drumline.simulator.step import simulate_step

CORE = DeviceSpec("core", "cpu", 4e11, 1e10, {"fp32": 1e11}, 5e-6)
CLUSTERS = {
    "GPUs": load("dgx-h100").with_devices(16),
    "CPUs": Cluster(
        "cores",
        CORE,
        Node(8, Link(2e-5, 5e9)),
        overlap=0.8,
        straggler_slowdown=1.1,
        mid_step_message_s=2e-3,
        sharded_unit_s=1e-3,
    ),
}
PROFILES = {
    "gpt": zoo.profile("gpt:1.3b", batch_size=64),
    "cnn": zoo.profile("resnet50", batch_size=64),
    "unet": zoo.profile("unet", batch_size=16),
}
REPLICAS = [
    "dp=1",
    "dp=1,micro=4,recompute=full",
    "dp=4",
    "dp=4,micro=2",
    "dp=4,zero=1,micro=2",
    "dp=4,zero=1,shard=2",
    "dp=4,zero=2,micro=2",
    "dp=4,zero=3,micro=2",
    "dp=4,zero=3,recompute=selective",
    "dp=4,zero=1,offload=optimizer",
    "dp=4,zero=3,offload=all,micro=2",
    "dp=1,zero=3,offload=all,micro=2",
    "dp=4,compress=fp16",
    "dp=4,compress=powersgd",
]
PIPELINES = [
    "pp=2,micro=4,schedule=naive",
    "pp=4,micro=8,schedule=gpipe",
    "pp=4,micro=8,schedule=1f1b",
    "pp=2,virtual=2,micro=4,schedule=interleaved",
    "pp=4,micro=8,schedule=zero-bubble",
    "pp=2,virtual=2,micro=4,schedule=zero-bubble",
    "dp=2,pp=2,micro=4,zero=1",
]
FEATURES = ["tp=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=2,micro=2", "tp=2,pp=2,micro=4,recompute=full"]
TOKENS = ["cp=2", "dp=2,cp=2", "cp=2,tp=2,micro=2"]
TILES = ["tile=1x2", "tile=2x2,dp=2", "dp=2,tile=2x1,zero=1"]
PLANS = {
    "gpt": [*REPLICAS, *PIPELINES, *FEATURES, *TOKENS],
    "cnn": [*REPLICAS, *PIPELINES, *TILES],
    "unet": [*REPLICAS[:10], *TILES],
}
CASES = [(cluster, model, text) for cluster in CLUSTERS for model, plans in PLANS.items() for text in plans]


def case(cluster: str, model: str, text: str) -> tuple[Profile, Plan, Cluster]:
    plan = Plan.parse(f"{text},precision={'bf16' if cluster == 'GPUs' else 'fp32'}")
    check(plan)
    return PROFILES[model], plan, CLUSTERS[cluster]


@pytest.mark.parametrize(("cluster", "model", "text"), CASES)
def test_the_timeline_ends_with_the_estimate(cluster: str, model: str, text: str) -> None:
    """Exactly if nothing overlaps; the closed form of overlapping collectives is within 5%."""
    profile, plan, machines = case(cluster, model, text)
    e = OperatorCostModel(profile, machines, plan.precision).estimate(plan)
    assert sum(e.parts.values()) == pytest.approx(e.step_seconds, rel=1e-12)
    assert sum(e.memory_parts.values()) == pytest.approx(e.memory_bytes, rel=1e-12)
    assert all(v >= 0 for v in (*e.parts.values(), *e.memory_parts.values(), e.hidden_seconds))
    timeline = simulate_step(profile, plan, machines)
    assert timeline.all_ranks == plan.ranks
    reduces = plan.dp > 1 and plan.pp == 1 and (plan.zero > 0 or not plan.splits_model)
    overlaps = reduces or plan.offload == "all"
    assert timeline.seconds == pytest.approx(e.step_seconds, rel=0.05 if overlaps else 1e-9)


@pytest.mark.parametrize(("cluster", "model", "text"), CASES)
def test_the_timeline_draws_the_parts_of_the_step(cluster: str, model: str, text: str) -> None:
    """Compute spans last as long as the estimate's parts, and every part after the backward is drawn."""
    profile, plan, machines = case(cluster, model, text)
    step = OperatorCostModel(profile, machines, plan.precision).step(plan)
    parts, _ = step.parts()
    drawn = simulate_step(profile, plan, machines).spans
    each = plan.ranks // plan.pp
    for stage, tail in enumerate(step.tails):
        spans = [s for s in drawn if s.rank == stage * each]
        for part in tail:
            seconds = sum(s.end - s.start for s in spans if s.name == part.name)
            assert part.messages or seconds == pytest.approx(part.seconds, rel=1e-6), part.name
            assert {m.name for m in part.messages} <= {s.name for s in spans}
    if step.pipeline is None:
        for part_name, phases in (("forward", ("forward",)), ("backward", ("backward", "recompute"))):
            seconds = sum(s.end - s.start for s in drawn if s.rank == 0 and s.name.startswith(f"{part_name} "))
            assert seconds == pytest.approx(sum(parts[p] for p in phases), rel=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["gpt:1.3b", "resnet50"])
def test_both_models_answer_the_same_questions(name: str, precision: str) -> None:
    """The fitted model prices gpt in bf16, the operator model the rest; callers need not know which they have."""
    profile, machines = zoo.profile(name, batch_size=64), load("dgx-a100").with_devices(8)
    model = cost_model(profile, machines, precision)
    assert isinstance(model, CostModel)
    assert bool(model.source) == (name.startswith("gpt") and precision == "bf16")
    plans = [Plan.parse(f"{text},precision={precision}") for text in ("dp=8", "dp=8,zero=3", "dp=4,pp=2,micro=4")]
    singles = [model.estimate(plan) for plan in plans]
    assert list(model.estimates(plans)) == singles
    assert model.seconds(plans) == pytest.approx([e.step_seconds for e in singles])
    for plan, e in zip(plans, singles, strict=True):
        assert model.memory(plan).total == e.memory_bytes
        assert model.fits(plan) == e.fits == (model.excess(plan) <= 0)
        assert model.rank_model(plan).profile.name == profile.name
    assert model.with_batch_size(128).with_batch_size(64).estimate(plans[0]) == singles[0]
    assert model.on_links_of(machines).estimate(plans[0]) == singles[0]


def test_an_estimate_does_not_depend_on_earlier_ones() -> None:
    """What is cached for one plan is not taken for another, of norms, stages and tails."""
    for model, texts in PLANS.items():
        profile, machines = PROFILES[model], CLUSTERS["CPUs"]
        shared = OperatorCostModel(profile, machines, "fp32")
        for text in (*texts, *reversed(texts)):
            plan = Plan.parse(text)
            assert shared.estimate(plan) == OperatorCostModel(profile, machines, "fp32").estimate(plan), text


def test_a_plan_that_splits_nothing_is_the_general_case() -> None:
    """All axes of size one, and one rank: the model is whole, no layer communicates, there is one stage."""
    profile, machines = PROFILES["gpt"], CLUSTERS["GPUs"]
    step = OperatorCostModel(profile, machines, "bf16").step(Plan(precision="bf16"))
    assert step.pipeline is None and len(step.tails) == 1
    assert not any(c.forward or c.backward or c.hidden for c in step.layer_comm)
    parts, hidden = step.parts()
    assert parts["communication"] == 0 and hidden == 0
    assert sum(parts.values()) == pytest.approx(
        sum(t.forward + t.backward for t in step.layers) + parts["optimizer"] + parts["overhead"]
    )
