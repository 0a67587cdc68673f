"""Guards of a split model: the rank where a bad number originated is named, and replicas are compared part by part."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import split_guard_functions as on_ranks
import torch
from world import World

from drumline.plans import Plan
from drumline.runtime.guards.replicas import compare_by_name

Worlds = Callable[..., World]

CASES = {
    "a part of a weight": (
        "tp=2",
        "weight",
        "second.up.weight",
        1,
        "'second.up.weight' was non-finite before the step",
    ),
    "the gradient of a part": (
        "tp=2",
        "gradient",
        "first.up.weight",
        1,
        "the gradient of 'first.up.weight' is non-finite, outputs and loss are finite",
    ),
    "the weight of a stage": (
        "pp=2,micro=2",
        "weight",
        "head.weight",
        1,
        "'head.weight' was non-finite before the step",
    ),
    "the gradient of the last stage": (
        "pp=2,micro=2",
        "gradient",
        "head.weight",
        1,
        "the gradient of 'head.weight' is non-finite",
    ),
    "the gradient of the first stage": (
        "pp=2,micro=2",
        "gradient",
        "first.up.weight",
        0,
        "the gradient of 'first.up.weight' is non-finite",
    ),
    "the output of a stage": (
        "pp=2,micro=2",
        "large",
        "head.weight",
        1,
        "the first non-finite output is that of 'head'",
    ),
    "the output of the first stage": (
        "pp=2,micro=2",
        "large",
        "first.up.weight",
        0,
        "the first non-finite output is that of 'first",
    ),
    "one copy of two": (
        "dp=2,tp=2",
        "gradient",
        "second.up.weight",
        3,
        "the gradient of 'second.up.weight' is non-finite",
    ),
    "stages of two copies": (
        "dp=2,pp=2,micro=2",
        "gradient",
        "first.up.weight",
        1,
        "the gradient of 'first.up.weight' is non-finite",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_originating_rank_is_named(world: Worlds, case: str) -> None:
    """Only that rank, on every rank; the step leaves no traces, and the next one is good."""
    plan, what, name, rank, text = CASES[case]
    for result in world(Plan.parse(plan).ranks).run(on_ranks.corrupted, plan, what, name, rank):
        assert result["ranks"] == (rank,) and result["where"].startswith(f"rank {rank}: {text}"), result["where"]
        assert name in result["names"] or what == "large"
        assert result["same"] and result["clean"] and result["steps"] == 3 and math.isfinite(result["loss"])
        assert result["what"].startswith("the loss is" if what != "gradient" else "non-finite gradients at step 2")


@pytest.mark.parametrize(("plan", "ranks"), [("tp=2", (0, 1)), ("pp=2,micro=2", (0,)), ("dp=2,tp=2", (0, 1))])
def test_bad_sample(world: Worlds, plan: str, ranks: tuple[int, ...]) -> None:
    """All ranks that read the sample are named, and the sample once."""
    for result in world(Plan.parse(plan).ranks).run(on_ranks.corrupted, plan, "input", "", 0):
        assert result["ranks"] == ranks and result["samples"] == (result["bad"],)
        assert (
            f"rank 0: the input of sample {result['bad']} is non-finite, the first non-finite output is that of 'first.up'"
            in result["where"]
        )
        assert result["same"] and result["clean"] and result["steps"] == 2


# -- comparison of replicas


@pytest.mark.parametrize(
    "plan", ["tp=2", "dp=2,tp=2", "dp=2,zero=1,tp=2", "pp=2,micro=2", "dp=2,pp=2,micro=2", "pp=2,tp=2,micro=2"]
)
def test_no_false_alarm(world: Worlds, plan: str) -> None:
    for steps, why in world(Plan.parse(plan).ranks).run(on_ranks.clean, plan, "gpt"):
        assert steps == 3
        assert ("are on one rank only" in why) == ("dp" not in plan), why


def test_statistics_are_compared(world: Worlds) -> None:
    for plan in ("tile=2x1", "dp=2,tile=2x1"):
        for steps, why in world(Plan.parse(plan).ranks).run(on_ranks.clean, plan, "pictures"):
            assert (steps, why) == (3, "")
    for where, steps in world(4).run(on_ranks.flipped, "dp=2,tile=2x1", 2, "norm.running_mean", "pictures"):
        assert steps == 1 and where.startswith("rank 2: 'norm.running_mean' differs from the majority")


def test_flipped_bit_in_a_part(world: Worlds) -> None:
    """Ranks 1 and 3 have the same part; whole parameters are on all four."""
    plan = "dp=2,tp=2"
    shapes = world(4).run(on_ranks.names, plan)
    [whole] = world(1).run(on_ranks.names, "dp=1")
    part = next(n for n, shape in shapes[3].items() if shape != whole[n])
    other = next(n for n, shape in shapes[3].items() if shape == whole[n])
    for where, steps in world(4).run(on_ranks.flipped, plan, 3, part):
        assert steps == 1 and where.startswith(f"ranks 1, 3: '{part}, part 1 of dim ") and "no majority" in where
        assert "rank 0" not in where and "ranks 0" not in where
    for where, _ in world(4).run(on_ranks.flipped, plan, 3, other):
        assert where == f"rank 3: '{other}' differs from the majority"


def test_flipped_bit_in_a_stage(world: Worlds) -> None:
    plan = "dp=2,pp=2,micro=2"
    shapes = world(4).run(on_ranks.names, plan)
    name = next(n for n in shapes[3] if n not in shapes[0])
    for where, steps in world(4).run(on_ranks.flipped, plan, 3, name):
        assert steps == 1 and where.startswith(f"ranks 2, 3: '{name}' differs")


def compared(flip: bool) -> list[tuple[str, tuple[int, ...], bool]]:
    """Three ranks have different tensors, some in common; with `flip` the last rank's copy is wrong."""
    rank = torch.distributed.get_rank()
    tensors = {"all": torch.ones(3), "first two": torch.ones(2), f"own {rank}": torch.full((2,), float(rank))}
    if rank == 2:
        del tensors["first two"]
        tensors["all"][1] += flip
    names = ["all", "first two", *(f"own {r}" for r in range(3))]
    world = torch.distributed.group.WORLD
    assert world is not None
    return [(d.name, d.ranks, d.majority) for d in compare_by_name(tensors, names, world, torch.device("cpu"))]


def test_comparison_of_different_tensors(world: Worlds) -> None:
    assert world(3).run(compared, False) == [[]] * 3
    assert world(3).run(compared, True) == [[("all", (2,), True)]] * 3
