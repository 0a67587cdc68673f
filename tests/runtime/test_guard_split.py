"""Guard rails where the plan splits the model: the rank that made a bad number is named, and parts are compared as parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import split_guard_functions as on_ranks
import torch
from world import World

from drumline.plans import Plan
from drumline.runtime.guards.digest import vote_by_name

Worlds = Callable[..., World]

CASES = {
    "a part of a weight": (
        "tp=2",
        "weight",
        "second.up.weight",
        1,
        "'second.up.weight' was not finite before the step",
    ),
    "the gradient of a part": (
        "tp=2",
        "gradient",
        "first.up.weight",
        1,
        "the gradient of 'first.up.weight' is not finite, outputs and loss are",
    ),
    "the weight of a stage": (
        "pp=2,micro=2",
        "weight",
        "head.weight",
        1,
        "'head.weight' was not finite before the step",
    ),
    "the gradient of the last stage": (
        "pp=2,micro=2",
        "gradient",
        "head.weight",
        1,
        "the gradient of 'head.weight' is not finite",
    ),
    "the gradient of the first stage": (
        "pp=2,micro=2",
        "gradient",
        "first.up.weight",
        0,
        "the gradient of 'first.up.weight' is not finite",
    ),
    "the output of a stage": (
        "pp=2,micro=2",
        "large",
        "head.weight",
        1,
        "the first output that is not finite is that of 'head'",
    ),
    "the output of the first stage": (
        "pp=2,micro=2",
        "large",
        "first.up.weight",
        0,
        "the first output that is not finite is that of 'first",
    ),
    "one copy of two": (
        "dp=2,tp=2",
        "gradient",
        "second.up.weight",
        3,
        "the gradient of 'second.up.weight' is not finite",
    ),
    "stages of two copies": (
        "dp=2,pp=2,micro=2",
        "gradient",
        "first.up.weight",
        1,
        "the gradient of 'first.up.weight' is not finite",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rank_is_named(world: Worlds, case: str) -> None:
    """That rank alone, on every rank; nothing of the step is left, and the next one is good."""
    plan, what, name, rank, text = CASES[case]
    for found in world(Plan.parse(plan).ranks).run(on_ranks.spoiled, plan, what, name, rank):
        assert found["ranks"] == (rank,) and found["where"].startswith(f"rank {rank}: {text}"), found["where"]
        assert name in found["names"] or what == "large"
        assert found["same"] and found["clean"] and found["steps"] == 3 and math.isfinite(found["loss"])
        assert found["what"].startswith(
            "the loss is" if what != "gradient" else "the gradients are not finite at step 2"
        )


@pytest.mark.parametrize(("plan", "ranks"), [("tp=2", (0, 1)), ("pp=2,micro=2", (0,)), ("dp=2,tp=2", (0, 1))])
def test_a_bad_sample(world: Worlds, plan: str, ranks: tuple[int, ...]) -> None:
    """All ranks that read it are named, and it once."""
    for found in world(Plan.parse(plan).ranks).run(on_ranks.spoiled, plan, "input", "", 0):
        assert found["ranks"] == ranks and found["samples"] == (found["bad"],)
        assert (
            f"rank 0: the input of sample {found['bad']} is not finite, the first output that is not finite is that of 'first.up'"
            in found["where"]
        )
        assert found["same"] and found["clean"] and found["steps"] == 2


# -- the vote


@pytest.mark.parametrize(
    "plan", ["tp=2", "dp=2,tp=2", "dp=2,zero=1,tp=2", "pp=2,micro=2", "dp=2,pp=2,micro=2", "pp=2,tp=2,micro=2"]
)
def test_no_false_alarm(world: Worlds, plan: str) -> None:
    for steps, why in world(Plan.parse(plan).ranks).run(on_ranks.clean, plan, "gpt"):
        assert steps == 3
        assert ("lie on one rank alone" in why) == ("dp" not in plan), why


def test_statistics_are_compared(world: Worlds) -> None:
    for plan in ("tile=2x1", "dp=2,tile=2x1"):
        for steps, why in world(Plan.parse(plan).ranks).run(on_ranks.clean, plan, "pictures"):
            assert (steps, why) == (3, "")
    for where, steps in world(4).run(on_ranks.flipped, "dp=2,tile=2x1", 2, "norm.running_mean", "pictures"):
        assert steps == 1 and where.startswith("rank 2: 'norm.running_mean' is not what the majority holds")


def test_a_flipped_bit_in_a_part(world: Worlds) -> None:
    """Ranks 1 and 3 have the same part; what is whole is on all four."""
    plan = "dp=2,tp=2"
    held = world(4).run(on_ranks.names, plan)
    [whole] = world(1).run(on_ranks.names, "dp=1")
    part = next(n for n, shape in held[3].items() if shape != whole[n])
    other = next(n for n, shape in held[3].items() if shape == whole[n])
    for where, steps in world(4).run(on_ranks.flipped, plan, 3, part):
        assert steps == 1 and where.startswith(f"ranks 1, 3: '{part}, part 1 of dim ") and "no majority" in where
        assert "rank 0" not in where and "ranks 0" not in where
    for where, _ in world(4).run(on_ranks.flipped, plan, 3, other):
        assert where == f"rank 3: '{other}' is not what the majority holds"


def test_a_flipped_bit_in_a_stage(world: Worlds) -> None:
    plan = "dp=2,pp=2,micro=2"
    held = world(4).run(on_ranks.names, plan)
    name = next(n for n in held[3] if n not in held[0])
    for where, steps in world(4).run(on_ranks.flipped, plan, 3, name):
        assert steps == 1 and where.startswith(f"ranks 2, 3: '{name}' differs")


def voted(flip: bool) -> list[tuple[str, tuple[int, ...], bool]]:
    """Three ranks hold different tensors, some of them alike; the last one's copy is wrong if asked."""
    rank = torch.distributed.get_rank()
    held = {"all": torch.ones(3), "first two": torch.ones(2), f"own {rank}": torch.full((2,), float(rank))}
    if rank == 2:
        del held["first two"]
        held["all"][1] += flip
    names = ["all", "first two", *(f"own {r}" for r in range(3))]
    world = torch.distributed.group.WORLD
    assert world is not None
    return [(d.name, d.ranks, d.majority) for d in vote_by_name(held, names, world, torch.device("cpu"))]


def test_the_vote_of_different_holders(world: Worlds) -> None:
    assert world(3).run(voted, False) == [[]] * 3
    assert world(3).run(voted, True) == [[("all", (2,), True)]] * 3
