"""Plans that split the model, in the search: what is offered where, that it pays where it should, how it is told."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from drumline.clusters import Link, load
from drumline.costs import Steps, estimate
from drumline.models import zoo
from drumline.planner import search
from drumline.planner.explain import reason
from drumline.planner.sharing import how_it_shares
from drumline.planner.space import candidates
from drumline.planner.splitting import shapes, splits
from drumline.plans import Plan, check

BASE = Plan(precision="bf16")
SIXTEEN = load("dgx-h100").with_devices(16)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gpt:1.3b", {"tp", "pp"}),
        ("llama:8b", {"tp", "pp", "cp"}),
        ("resnet50", {"tp", "pp", "tile"}),
        ("mlp:4x4096", {"tp", "pp"}),
    ],
)
def test_what_a_model_has_is_split(name: str, keys: set[str]) -> None:
    """Sequences of 2048 tokens are not long enough for cp; images are tiled."""
    plans = list(splits(zoo.profile(name), SIXTEEN, BASE))
    seen = {k for p in plans for k in p.table() if k in ("tp", "pp", "cp", "tile")}
    assert seen == keys and len(plans) == len(set(plans))
    for plan in plans:
        check(plan)
        assert plan.ranks == 16 and plan.dp * plan.micro <= zoo.profile(name).batch_size


def test_one_device_has_nothing_to_split_over() -> None:
    assert not list(shapes(zoo.profile("gpt:1.3b"), load("one-a100"), BASE))
    assert not any(p.splits_model for p in candidates(zoo.profile("gpt:1.3b"), load("one-a100"), BASE))


def test_features_stay_in_a_node_and_heads_whole() -> None:
    two = SIXTEEN
    assert {p.tp for p in shapes(zoo.profile("gpt:1.3b"), two, BASE)} == {1, 2, 4, 8}
    assert {p.tp for p in splits(zoo.profile("bert:base"), two, BASE)} == {1, 2, 4}, "12 heads, and 8 ranks"


def test_every_candidate_has_a_price() -> None:
    """Also those whose stages are few, and whose batch is small."""
    for name in ("gpt:125m", "resnet18", "unet", "vit:base", "lstm:2x1024", "mlp:4x4096", "vgg11"):
        profile = zoo.profile(name, batch_size=4)
        steps = Steps(profile, load("dgx-a100").with_devices(4), "bf16")
        plans = list(splits(profile, load("dgx-a100").with_devices(4), BASE))
        assert plans
        for plan in plans:
            e = steps.estimate(plan)
            assert e.step_seconds > 0 and e.memory_bytes > 0


def test_a_model_too_large_for_a_device_is_split_over_slow_nodes() -> None:
    """Where the network is slow, gathering every layer loses to handing on activations."""
    slow = load("dgx-h100").with_devices(64)
    assert slow.network is not None
    slow = replace(slow, network=replace(slow.network, link=Link(1e-5, 12.5e9)))
    answer, estimates = search(zoo.profile("gpt:13b", batch_size=128), slow)
    best = Plan.parse(answer.candidates[0].plan)
    assert best.splits_model and best.pp > 1
    assert "have a stage each" in answer.explanation
    assert estimates[str(best)].fits


def test_few_samples_are_shared() -> None:
    """Two images on eight devices: more ranks than samples help only if ranks share a sample."""
    answer, _ = search(zoo.profile("unet", batch_size=2), load("dgx-h100").with_devices(8))
    assert Plan.parse(answer.candidates[0].plan).splits_model


def test_a_search_over_64_ranks_takes_seconds() -> None:
    for name in ("gpt:175b", "llama:70b"):
        start = time.process_time()
        answer, _ = search(zoo.profile(name), load("dgx-h100").with_devices(64))
        assert any("pp=" in c.plan and "tp=" in c.plan for c in answer.candidates)
        assert time.process_time() - start < 20.0  # 2 on an idle core; ten times that on a crowded machine


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("llama:8b", "tp=8", ["8 ranks, of one node, share the features", "1/8 of its products", "that nothing hides"]),
        ("llama:8b", "tp=8,pp=2,micro=8", ["2 ranks, 8 apart, have a stage each", "over the network", "% of the step"]),
        ("llama:8b", "pp=2,virtual=2,schedule=interleaved,micro=8", ["of 2 parts", "inside a node"]),
        ("llama:8b", "cp=2", ["2 ranks share the tokens"]),
        ("unet", "tile=2x2", ["4 ranks share every image"]),
        ("llama:8b", "dp=2,tp=4,zero=1", ["Optimizer state of a rank's part of the model lies over 2 ranks"]),
    ],
)
def test_each_trade_is_told(name: str, plan: str, words: list[str]) -> None:
    profile, chosen = zoo.profile(name, batch_size=64), Plan.parse(plan + ",precision=bf16")
    text = " ".join(how_it_shares(profile, chosen, estimate(profile, chosen, SIXTEEN), SIXTEEN))
    assert all(word in text for word in words), text


def test_the_bubble_is_a_reason() -> None:
    profile = zoo.profile("gpt:1.3b", batch_size=64)
    best, piped = (estimate(profile, Plan.parse(p + ",precision=bf16"), SIXTEEN) for p in ("dp=16", "pp=16,micro=16"))
    assert "slower: bubble takes" in reason(piped, best, BASE)
