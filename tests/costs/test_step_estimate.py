"""Estimates of a step: parts that add up, memory that follows the plan, a timeline that agrees."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from drumline.clusters import Cluster, load
from drumline.core.errors import ClusterError
from drumline.costs import estimate
from drumline.costs.layer_time import largest_micro_batch
from drumline.costs.memory import peak_memory
from drumline.models import Profile, zoo
from drumline.plans import Plan
from drumline.simulator.step import simulate_step


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load("dgx-h100").with_devices(16)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return zoo.profile("gpt:1.3b", batch_size=64)


def plans() -> list[str]:
    return [
        f"dp={dp},zero={zero},micro={micro},recompute={recompute},precision=bf16"
        for dp, zero, micro, recompute in itertools.product((1, 2, 16), (0, 3), (1, 4), ("none", "full"))
    ]


@pytest.mark.parametrize("text", plans())
def test_parts_add_up(text: str, profile: Profile, cluster: Cluster) -> None:
    e = estimate(profile, Plan.parse(text), cluster)
    assert sum(e.parts.values()) == pytest.approx(e.step_seconds)
    assert sum(e.memory_parts.values()) == pytest.approx(e.memory_bytes)
    assert all(v >= 0 for v in [*e.parts.values(), *e.memory_parts.values(), e.hidden_seconds])


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("text", plans())
def test_the_timeline_agrees_with_the_estimate(text: str, overlap: float, profile: Profile, cluster: Cluster) -> None:
    plan, machines = Plan.parse(text), dataclasses.replace(cluster, overlap=overlap)
    e = estimate(profile, plan, machines)
    timeline = simulate_step(profile, plan, machines)
    assert timeline.all_ranks == plan.dp
    assert timeline.seconds == pytest.approx(e.step_seconds, rel=0.05)


def test_states_are_sharded(profile: Profile) -> None:
    whole, sharded = (peak_memory(profile, Plan.parse(f"dp=8,zero={z},micro=2"), 1) for z in (0, 3))
    assert sharded.parameters == pytest.approx(whole.parameters / 8, rel=1e-6)
    assert sharded.optimizer == pytest.approx(whole.optimizer / 8)
    assert sharded.gradients == pytest.approx(whole.gradients / 8)


def test_recomputation_trades_memory_for_time(profile: Profile, cluster: Cluster) -> None:
    none, full = (estimate(profile, Plan.parse(f"recompute={r},precision=bf16"), cluster) for r in ("none", "full"))
    assert full.memory_parts["activations"] < 0.5 * none.memory_parts["activations"]
    blocks = sum(x.repeats for x in profile.layers if x.composite)
    assert blocks and full.parts["recompute"] == pytest.approx(none.parts["forward"], rel=0.2)


def test_micro_batches_divide_activations(profile: Profile) -> None:
    one, four = (
        peak_memory(profile, Plan.parse(f"micro={m}"), largest_micro_batch(64, Plan.parse(f"micro={m}")))
        for m in (1, 4)
    )
    assert four.activations < 0.3 * one.activations


@pytest.mark.parametrize(("batch", "plan", "share"), [(8, "dp=3", 3), (7, "dp=2,micro=2", 2), (5, "dp=1,micro=5", 1)])
def test_the_busiest_rank(batch: int, plan: str, share: int) -> None:
    assert largest_micro_batch(batch, Plan.parse(plan)) == share


def test_slow_links_cost_communication(profile: Profile, cluster: Cluster) -> None:
    slow = dataclasses.replace(
        cluster,
        network=dataclasses.replace(cluster.network, link=dataclasses.replace(cluster.network.link, bandwidth=1e9)),
    )
    plan = Plan.parse("dp=16,precision=bf16")
    fast, late = estimate(profile, plan, cluster), estimate(profile, plan, slow)
    assert late.parts["communication"] > 10 * fast.parts["communication"]
    assert late.parts["forward"] == fast.parts["forward"]


def test_missing_precision(profile: Profile) -> None:
    with pytest.raises(ClusterError, match="has no rate for bf16"):
        estimate(profile, Plan.parse("precision=bf16"), load("dgx-v100"))


def test_file_form(profile: Profile, cluster: Cluster, tmp_path: object) -> None:
    from pathlib import Path

    from drumline.costs import Estimate

    e = estimate(profile, Plan.parse("dp=4,precision=bf16"), cluster)
    path = Path(str(tmp_path)) / "e.json"
    e.save(path)
    assert Estimate.load(path) == e
    assert "dp=4" in str(e)


def test_slowdowns_between_ranks(profile: Profile, cluster: Cluster) -> None:
    """Each of the measured factors reaches the estimate, and only if ranks communicate."""
    alone, pair, sharded = (
        Plan.parse("precision=bf16"),
        Plan.parse("dp=2,precision=bf16"),
        Plan.parse("dp=2,zero=3,precision=bf16"),
    )
    late = dataclasses.replace(cluster, straggler_slowdown=1.5, sharded_unit_s=0.01)
    assert estimate(profile, alone, late) == estimate(profile, alone, cluster)
    before, after = estimate(profile, pair, cluster), estimate(profile, pair, late)
    assert after.parts["forward"] == pytest.approx(1.5 * before.parts["forward"])
    units = sum(x.repeats for x in profile.layers if x.shard_unit) + 1
    slack = dataclasses.replace(cluster, sharded_unit_s=0.01)
    more = (
        estimate(profile, sharded, slack).parts["communication"]
        - estimate(profile, sharded, cluster).parts["communication"]
    )
    assert more == pytest.approx(0.01 * units)
    stalled = dataclasses.replace(cluster, mid_step_message_s=0.01)
    norms = dataclasses.replace(profile, layers=tuple(dataclasses.replace(x, batch_norms=1) for x in profile.layers))
    waits = (
        estimate(norms, pair, stalled).parts["communication"] - estimate(profile, pair, stalled).parts["communication"]
    )
    assert waits == pytest.approx(2 * 0.01 * sum(x.repeats for x in profile.layers))


def test_in_step_slowdown(profile: Profile, cluster: Cluster) -> None:
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, rates="data-sheet"))
    slow = dataclasses.replace(
        cluster, device=dataclasses.replace(cluster.device, in_step_slowdown={"compute": 2.0, "update": 3.0})
    )
    a, b = (estimate(profile, Plan.parse("precision=bf16"), c) for c in (cluster, slow))
    assert b.parts["forward"] == pytest.approx(2 * a.parts["forward"])
    assert b.parts["optimizer"] == pytest.approx(3 * a.parts["optimizer"])


def test_the_current_speed(profile: Profile, cluster: Cluster) -> None:
    plan = Plan.parse("dp=4,precision=bf16")
    e = estimate(profile, plan, cluster)
    half = e.at_speed(0.5)
    assert half.step_seconds == pytest.approx(2 * e.step_seconds) == pytest.approx(sum(half.parts.values()))
    assert half.memory_bytes == e.memory_bytes and "0.50 of its measured speed" in half.notes[-1]
    timeline = simulate_step(profile, plan, cluster, speed=0.5)
    assert timeline.seconds == pytest.approx(half.step_seconds, rel=0.05)
