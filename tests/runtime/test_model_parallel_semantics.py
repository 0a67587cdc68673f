"""Semantics of split models beyond what `verify` compares: norms and rates of every step, buffers, masks, evaluation."""

from __future__ import annotations

from collections.abc import Callable

import parity
import pytest
import small_jobs
import split_functions as on_ranks
import torch
from world import World

from drumline.plans import Plan

Worlds = Callable[[int], World]


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "tp=2"),
        ("gpt", "pp=2,micro=3"),
        ("mlp", "pp=2,micro=2,schedule=zero-bubble"),
        ("masked", "cp=2,micro=2"),
        ("resnet", "tile=2x1"),
        ("resnet", "pp=2,micro=2"),
        ("convnet", "tp=2,dp=2"),
        ("resnet", "dp=2,tile=1x2"),
        ("gpt", "tp=2,pp=2,micro=3"),
        ("mlp", "dp=2,pp=2,micro=3,zero=1"),
    ],
)
def test_losses_norms_and_rates_of_every_step(world: Worlds, job: str, plan: str) -> None:
    """Loss, norm before clipping and rate of every step are one device's, on every rank; so are weights and buffers."""
    ranks, micro = Plan.parse(plan).ranks, Plan.parse(plan).micro
    # Adam divides the rounding of gradients that are zero, such as a key's bias, by itself: no two runs agree there
    changes = {"clip": None, "optimizer": small_jobs.sgd, "schedule": small_jobs.decay}
    expected = parity.serial(job, micro=micro, changes=changes)
    plain = world(1).run(parity.run_losses, job, f"micro={micro}", parity.STEPS, changes)[0]
    buffers: set[str] = set()
    for result in world(ranks).run(parity.run_losses, job, plan, parity.STEPS, changes):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert result["rates"] == plain["rates"]
        assert set(result["weights"]) == set(expected["weights"])
        buffers |= set(result["buffers"])
        for kind in ("weights", "buffers"):
            for name, value in result[kind].items():
                torch.testing.assert_close(value, expected[kind][name], rtol=1e-9, atol=1e-12, msg=name)
    assert buffers == set(expected["buffers"])


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2", "cp=2"])
def test_clipping_uses_the_norm_of_the_whole_model(world: Worlds, plan: str) -> None:
    """A norm far above the bound: with a wrong one the second step would differ."""
    changes, micro = {"clip": 1e-3, "optimizer": torch.optim.SGD}, Plan.parse(plan).micro
    expected = parity.serial("gpt", micro=micro, changes=changes)["losses"]
    for result in world(2).run(parity.run_losses, "gpt", plan, parity.STEPS, changes):
        assert result["losses"] == pytest.approx(expected, rel=1e-10)
        assert min(result["norms"]) > 1e-2


def test_dropout_masks_under_tensor_parallelism(world: Worlds) -> None:
    """Tensors that all ranks have share one mask; parts, replicas and steps have masks of their own."""
    a, b, c, d = world(4).run(on_ranks.masks, "dp=2,tp=2")
    for first, second in ((a, b), (c, d)):
        assert all(torch.equal(x, y) for x, y in zip(first["same"], second["same"], strict=True))
        assert not any(torch.equal(x, y) for x, y in zip(first["own"], second["own"], strict=True))
    assert a["own"][0].shape[1] == 32  # of 64: the layer is split
    assert not torch.equal(a["same"][0], a["same"][1])
    assert not any(torch.equal(x[:3], y[:3]) for x, y in zip(a["same"], c["same"], strict=True))  # slices of 4 and 3


def test_dropout_masks_under_a_pipeline(world: Worlds) -> None:
    """Each micro-batch has its own, whatever the order."""
    orders = [world(2).run(on_ranks.masks, f"pp=2,micro=3{order}") for order in ("", ",schedule=gpipe")]
    for key in ("same", "own"):
        first, second = ([m for rank in ranks for m in rank[key]] for ranks in orders)
        assert len(first) == len(second) == 6
        assert {tuple(m.flatten().tolist()) for m in first} == {tuple(m.flatten().tolist()) for m in second}
        assert len({tuple(m.flatten().tolist()) for m in first}) == 6


@pytest.mark.parametrize("plan", ["tp=2", "cp=2", "tp=2,recompute=full"])
def test_dropout_keeps_ranks_in_step(world: Worlds, plan: str) -> None:
    assert world(2).run(on_ranks.whole_on_every_rank, "dropout", plan) == [0.0, 0.0]


def test_evaluation(world: Worlds) -> None:
    cases = {
        2: [
            ("gpt", "tp=2"),
            ("gpt", "cp=2"),
            ("gpt", "pp=2,micro=2"),
            ("mlp", "pp=2,micro=3,schedule=zero-bubble"),
            ("resnet", "tile=2x1"),
            ("convnet", "pp=2,micro=2"),
            ("groups", "tile=1x2"),
            ("gpt", "tp=2,recompute=full"),
        ],
        4: [("gpt", "dp=2,tp=2"), ("resnet", "dp=2,tile=1x2"), ("mlp", "dp=2,pp=2,micro=3")],
    }
    serial = {case: (case[0], f"micro={Plan.parse(case[1]).micro}") for tried in cases.values() for case in tried}
    once = list(dict.fromkeys(serial.values()))
    expected = dict(zip(once, world(1).run(on_ranks.evaluated, once, timeout=120)[0], strict=True))
    for ranks, tried in cases.items():
        for result in world(ranks).run(on_ranks.evaluated, tried, timeout=300):
            for case, mine in zip(tried, result, strict=True):
                assert mine == pytest.approx(expected[serial[case]], rel=1e-9), case


def test_own_loop(world: Worlds) -> None:
    expected = {job: world(1).run(on_ranks.own_loop, [(job, "dp=1")])[0][0] for job in ("mlp", "gpt", "groups")}
    for ranks, plans in {
        2: [("gpt", "tp=2"), ("mlp", "tp=2,micro=3"), ("mlp", "pp=2,micro=3"), ("gpt", "cp=2"), ("groups", "tile=2x1")],
        4: [("mlp", "dp=2,pp=2,micro=2"), ("gpt", "dp=2,tp=2")],
    }.items():
        for result in world(ranks).run(on_ranks.own_loop, plans, timeout=200):
            for case, losses in zip(plans, result, strict=True):
                assert losses == pytest.approx(expected[case[0]], rel=1e-9), case
