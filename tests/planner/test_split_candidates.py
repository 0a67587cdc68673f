"""Plans that split the model: which are candidates, where they win, and how they are explained."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from drumline.clusters import Cluster, Link, load
from drumline.costs import OperatorCostModel, estimate
from drumline.models import Profile, zoo
from drumline.planner import search
from drumline.planner.explain import reason
from drumline.planner.space import SearchSpace, candidates, split_candidates
from drumline.planner.tradeoffs import describe_tradeoffs
from drumline.plans import Plan, check

BASE = Plan(precision="bf16")
SIXTEEN = load("dgx-h100").with_devices(16)


def space(profile: Profile, cluster: Cluster) -> SearchSpace:
    return SearchSpace(profile, cluster, BASE, OperatorCostModel(profile, cluster, "bf16"))


def splits(profile: Profile, cluster: Cluster) -> list[Plan]:
    model = OperatorCostModel(profile, cluster, "bf16")
    return list(split_candidates(space(profile, cluster), BASE, model.fits))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gpt:1.3b", {"tp", "pp"}),
        ("llama:8b", {"tp", "pp", "cp"}),
        ("resnet50", {"tp", "pp", "tile"}),
        ("mlp:4x4096", {"tp", "pp"}),
    ],
)
def test_models_are_split_along_the_axes_that_they_have(name: str, keys: set[str]) -> None:
    """Sequences of 2048 tokens are not long enough for cp; images are tiled."""
    plans = splits(zoo.profile(name), SIXTEEN)
    seen = {k for p in plans for k in p.table() if k in ("tp", "pp", "cp", "tile")}
    assert seen == keys and len(plans) == len(set(plans))
    for plan in plans:
        check(plan)
        assert plan.exact and not plan.keeps_batches_in_flight, "stale updates are never candidates"
        assert plan.ranks == 16 and plan.dp * plan.micro <= zoo.profile(name).batch_size


def test_one_device_has_no_split_plans() -> None:
    assert not list(space(zoo.profile("gpt:1.3b"), load("one-a100")).meshes())
    assert not any(p.splits_model for p in candidates(zoo.profile("gpt:1.3b"), load("one-a100"), BASE))


def test_tensor_parallelism_stays_in_a_node_and_keeps_heads_whole() -> None:
    assert {tp for _, tp, *_ in space(zoo.profile("gpt:1.3b"), SIXTEEN).meshes()} == {1, 2, 4, 8}
    assert {p.tp for p in splits(zoo.profile("bert:base"), SIXTEEN)} == {1, 2, 4}, "12 heads, and 8 ranks"


def test_every_candidate_can_be_priced() -> None:
    """Also with few stages and small batches."""
    for name in ("gpt:125m", "resnet18", "unet", "vit:base", "lstm:2x1024", "mlp:4x4096", "vgg11"):
        profile = zoo.profile(name, batch_size=4)
        steps = OperatorCostModel(profile, load("dgx-a100").with_devices(4), "bf16")
        plans = splits(profile, load("dgx-a100").with_devices(4))
        assert plans
        for plan in plans:
            e = steps.estimate(plan)
            assert e.step_seconds > 0 and e.memory_bytes > 0


def test_a_model_too_large_for_a_device_is_split_over_slow_nodes() -> None:
    """On a slow network, gathering every layer loses to passing activations on."""
    slow = load("dgx-h100").with_devices(64)
    assert slow.network is not None
    slow = replace(slow, network=replace(slow.network, link=Link(1e-5, 12.5e9)))
    answer, estimates = search(zoo.profile("gpt:13b", batch_size=128), slow)
    best = answer.best.plan
    assert best.splits_model and best.pp > 1
    assert "A pipeline of" in answer.explanation
    assert estimates[str(best)].fits


def test_ranks_share_samples_where_there_are_few() -> None:
    """Two images on eight devices: more ranks than samples only help if they share a sample."""
    answer, _ = search(zoo.profile("unet", batch_size=2), load("dgx-h100").with_devices(8))
    assert answer.best.plan.splits_model


def test_a_search_over_64_ranks_takes_seconds() -> None:
    for name in ("gpt:175b", "llama:70b"):
        start = time.process_time()
        answer, _ = search(zoo.profile(name), load("dgx-h100").with_devices(64))
        assert any(c.plan.pp > 1 and c.plan.tp > 1 for c in answer.candidates)
        assert time.process_time() - start < 20.0  # 2 on an idle core; ten times that on a crowded machine


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("llama:8b", "tp=8", ["splits every layer over 8 ranks of one node", "1/8 of its matmuls", "exposed messages"]),
        ("llama:8b", "tp=8,pp=2,micro=8", ["A pipeline of 2 ranks", "over the network", "% of the step"]),
        ("llama:8b", "pp=2,virtual=2,schedule=interleaved,micro=8", ["2 stages per rank", "inside a node"]),
        ("llama:8b", "cp=2", ["splits every sequence over 2 ranks"]),
        ("unet", "tile=2x2", ["Every image is split over 4 ranks"]),
        ("llama:8b", "dp=2,tp=4,zero=1", ["Optimizer state of a rank's part of the model is sharded over 2 ranks"]),
    ],
)
def test_every_tradeoff_is_described(name: str, plan: str, words: list[str]) -> None:
    profile, chosen = zoo.profile(name, batch_size=64), Plan.parse(plan + ",precision=bf16")
    text = " ".join(describe_tradeoffs(profile, chosen, estimate(profile, chosen, SIXTEEN), SIXTEEN))
    assert all(word in text for word in words), text


def test_the_bubble_is_a_reason() -> None:
    profile = zoo.profile("gpt:1.3b", batch_size=64)
    best, piped = (estimate(profile, Plan.parse(p + ",precision=bf16"), SIXTEEN) for p in ("dp=16", "pp=16,micro=16"))
    assert "slower: bubble takes" in reason(piped, best, BASE)
