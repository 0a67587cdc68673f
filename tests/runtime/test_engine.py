"""The engine, beyond parity: evaluation, own loops, clipping, schedules, dropout, weights, and refusals."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import engine_functions as on_ranks
import parity
import pytest
import small_jobs
import torch
from world import World

from drumline.core.errors import JobError, PlanError
from drumline.plans import Plan

Worlds = Callable[[int], World]
PLANS = ["dp=1", "dp=2", "dp=3,micro=2", "dp=4,zero=3", "dp=2,zero=3,recompute=full,micro=3", "dp=1,zero=3"]


def run(world: Worlds, plan: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return world(Plan.parse(plan).ranks).run(function, *arguments)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("samples", [1, 11, 16])
def test_evaluation_is_exact(world: Worlds, name: str, samples: int) -> None:
    for micro in ("micro=1", "micro=2"):
        [one] = world(1).run(on_ranks.evaluate, name, micro, samples)
        assert set(one) == {f"{g}{k}" for g in ("", "given ") for k in ("loss", "accuracy", "ones", "rate")}
        assert one["accuracy"] == one["ones"] == one["rate"]
        for plan in ("dp=2", "dp=3") if micro == "micro=1" else ("dp=3,zero=3",):
            for result in run(world, plan, on_ranks.evaluate, name, f"{plan},{micro}", samples):
                assert result == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("samples", [2, 8])
def test_evaluation_of_batch_statistics(world: Worlds, samples: int) -> None:
    """A rank without samples does not count in the statistics of an evaluation."""
    [one] = world(1).run(on_ranks.evaluate_batch_statistics, "dp=1", samples)
    for plan in ("dp=3", "dp=3,zero=3", "dp=4"):
        for result in run(world, plan, on_ranks.evaluate_batch_statistics, plan, samples):
            assert result == pytest.approx(one, rel=1e-10)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=1,zero=3", "dp=2,zero=3", "dp=2,zero=3,recompute=full"])
def test_norms_in_half_precision(world: Worlds, plan: str) -> None:
    """A sharded bf16 plan gathers the weights of norms in bf16 too; they train and evaluate correctly."""
    [(evaluated, loss)] = world(1).run(on_ranks.evaluate_half, "dp=1")
    for result in run(world, plan, on_ranks.evaluate_half, f"{plan},precision=bf16"):
        assert result == pytest.approx((evaluated, loss), rel=0.02)


def test_metric_without_samples(world: Worlds) -> None:
    for result in world(2).run(on_ranks.evaluate_nothing, "dp=2"):
        assert math.isnan(result["none"])
        assert result["loss"] > 0


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,micro=2"])
def test_own_loop(world: Worlds, plan: str) -> None:
    """Ranks may have different numbers of samples: the loss is the mean over all of them."""
    [expected] = world(1).run(on_ranks.own_loop, "mlp", "dp=1", [9])
    for losses in world(2).run(on_ranks.own_loop, "mlp", plan, [7, 2]):
        assert losses == pytest.approx(expected, rel=1e-10)
    [expected] = world(1).run(on_ranks.own_loop, "masked", "dp=1", [9], "masked")
    for losses in world(2).run(on_ranks.own_loop, "masked", plan, [4, 5], "masked"):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_invalid_own_batches(world: Worlds) -> None:
    with pytest.raises(JobError, match="1 samples for micro=2\n  rule:  each rank has at least one sample"):
        world(2).run(on_ranks.own_loop, "mlp", "dp=2,micro=2", [1, 1])
    with pytest.raises(
        JobError,
        match=r"a batch is a Tensor\n  rule:  a batch is \(input, target\), \{name: tensor\}, or from data\(\)",
    ):
        world(1).run(step_on, torch.zeros(2))
    with pytest.raises(JobError, match="a batch has no tensor"):
        world(1).run(step_on, (1, 2))


def step_on(batch: Any) -> float:
    return on_ranks.initialize(small_jobs.make("mlp")).step(batch)


def test_clip_and_schedule_under_every_plan(world: Worlds) -> None:
    reference = {m: parity.serial("gpt", micro=m, changes={"clip": None}) for m in (1, 2, 3)}
    for plan in PLANS:
        free = run(world, plan, parity.run_losses, "gpt", plan, 4, {"clip": None})[0]
        assert free["norms"] == pytest.approx(reference[Plan.parse(plan).micro]["norms"], rel=1e-9)
        for result in run(world, plan, parity.run_losses, "gpt", plan):
            assert result["rates"] == [5e-3, 2.5e-3, 1.25e-3, 6.25e-4]
            assert result["norms"][0] == pytest.approx(free["norms"][0], rel=1e-9)  # before clipping
            assert result["norms"][0] > 0.1  # so it was clipped


def test_wrong_number_of_ranks(world: Worlds) -> None:
    with pytest.raises(PlanError) as caught:
        world(2).run(on_ranks.refuse, "mlp", "dp=3,zero=3")
    assert caught.value.what == "the plan dp=3,zero=3 is for 3 ranks, but 2 were started"
    assert caught.value.rule.endswith("(3) != 2 ranks")
    assert caught.value.fix == "dp=2, or start 3 ranks"
    with pytest.raises(PlanError, match=r"is for 1 rank, but 2 were started\n  rule:  .*\(1\) != 2 ranks"):
        world(2).run(on_ranks.refuse, "mlp", "dp=1")


@pytest.mark.parametrize("key", ["precision=fp8,cp=2,dp=1", "offload=all", "shard"])
def test_untested_combinations_are_refused(world: Worlds, key: str) -> None:
    plan = "dp=2,shard=2" if key == "shard" else f"dp=2,{key}" if "dp" not in key else key
    with pytest.raises(PlanError, match=f"the engine does not run {key.split(',')[0]}"):
        world(2).run(on_ranks.refuse, "mlp", plan)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_non_elementwise_optimizers_are_refused(world: Worlds, name: str) -> None:
    with pytest.raises(PlanError, match=f"{name.capitalize()} cannot be sharded\n  where: plan dp=2,zero=3") as caught:
        world(2).run(on_ranks.with_optimizer, name, "dp=2,zero=3")
    assert caught.value.fix == "zero=0, or an element-wise optimizer such as AdamW"
    assert world(2).run(on_ranks.with_optimizer, name, "dp=2")[0] > 0
    assert world(2).run(on_ranks.with_optimizer, "adam", "dp=2,zero=3")[0] > 0


def test_recompute_without_blocks_is_refused(world: Worlds) -> None:
    with pytest.raises(PlanError, match="recompute=full saves nothing for Flat\n.*\n  try:   recompute=none, or group"):
        world(1).run(on_ranks.refuse, "mlp", "recompute=full", {"model": on_ranks.Flat})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": list}, r"the job's model\(\) gave list\n  rule:  it returns a torch.nn.Module"),
        ({"model": torch.nn.ReLU}, "ReLU has no parameter to train"),
        ({"optimizer": len}, r"the job's optimizer\(\) gave int\n  rule:  it returns a torch.optim.Optimizer"),
        ({"data": dict}, "the dataset is empty"),
    ],
)
def test_invalid_jobs(world: Worlds, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        world(1).run(on_ranks.refuse, "mlp", "dp=1", changes)


@pytest.mark.parametrize("name", small_jobs.JOBS)
def test_sharded_weights_equal_serial_weights(world: Worlds, name: str) -> None:
    assert world(3).run(on_ranks.weights_after_initialize, name) == [True] * 3


def test_only_the_first_rank_builds_a_sharded_model(world: Worlds) -> None:
    assert world(2).run(on_ranks.where_models_are_built, "dp=2,zero=3") == [
        Counter({"cpu": 1, "meta": 1, "without values": 1}),
        Counter({"meta": 1, "without values": 1}),
    ]
    assert all(built["cpu"] >= 1 for built in world(2).run(on_ranks.where_models_are_built, "dp=2"))


def test_dropout_masks_differ_between_ranks_and_micro_batches(world: Worlds) -> None:
    masks = [tuple(m) for rank in world(2).run(on_ranks.dropout_masks, "dp=2,micro=3") for m in rank]
    assert len(masks) == len(set(masks)) == 6
    assert world(2).run(on_ranks.dropout_masks, "dp=2,micro=3") == [
        [list(m) for m in masks[:3]],
        [list(m) for m in masks[3:]],
    ]


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,zero=3", "dp=2,micro=2"])
def test_recomputation_repeats_dropout_masks(world: Worlds, plan: str) -> None:
    kept = run(world, plan, on_ranks.gradients_with_dropout, plan)[0]
    again = run(world, plan, on_ranks.gradients_with_dropout, f"{plan},recompute=full")[0]
    assert set(kept) == set(again)
    for k, g in kept.items():
        torch.testing.assert_close(again[k], g, rtol=1e-12, atol=1e-14, msg=k)


def test_phases_are_timed(world: Worlds) -> None:
    phases = {"data", "forward", "backward", "communication", "optimizer"}
    assert world(2).run(on_ranks.clocked, "dp=2,micro=2") == [(phases, 3)] * 2


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=4", "dp=3,zero=3,micro=2"])
def test_mean_loss_with_separate_weight(world: Worlds, plan: str) -> None:
    """Ranks whose slice has weight 0 have no mean; they must not affect the others."""
    expected = run(world, plan, on_ranks.ignoring, plan, False)
    for result, pair in zip(run(world, plan, on_ranks.ignoring, plan, True), expected, strict=True):
        assert result == pytest.approx(pair, rel=1e-10)


def test_batch_without_weight(world: Worlds) -> None:
    with pytest.raises(
        JobError, match="step 0: the batch has no weight\n  rule:  the weights of a batch add up to > 0"
    ):
        world(2).run(on_ranks.batch_without_weight)


def test_nonfinite_loss(world: Worlds) -> None:
    for text in world(2).run(on_ranks.infinite_loss):
        assert re.match(
            r"the loss is (-?inf|nan) at step 0\n  where: rank 1: the loss is non-finite, all outputs are finite", text
        )
