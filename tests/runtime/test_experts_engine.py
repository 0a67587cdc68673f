"""Expert parallelism in the engine: runs under `ep` equal one device, in every combination.

`ep` is refused for a model without experts, so it belongs to ELSEWHERE of parity.py, and cells.py has nothing to try:
its plans are tested here. A matrix that takes jobs of expert_jobs.py can offer ep=2 to these, where it divides dp.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import expert_jobs
import hf_jobs
import parity
import pytest
import torch
from world import World

import drumline as dl
from drumline.core.errors import PlanError
from drumline.partition.experts import Experts
from drumline.plans import Plan
from drumline.plans.combinations import check, conflict

Worlds = Callable[..., World]
IMPORTS = 200.0
"""Seconds: every rank imports transformers first."""
needs_transformers = pytest.mark.skipif(bool(hf_jobs.missing()), reason=hf_jobs.missing() or "it is there")


def check_cells(world: Worlds, ranks: int, cells: list[tuple[str, str]]) -> None:
    for result in world(ranks).run(expert_jobs.verified, cells, timeout=IMPORTS)[0]:
        parity.check(result)


def test_two_ranks(world: Worlds) -> None:
    """Batches of 7, 7 and 3; tied, frozen and unused parameters; experts without tokens, and of different sizes."""
    check_cells(
        world,
        2,
        [
            ("mixture", "dp=2,ep=2"),
            ("masked", "dp=2,ep=2,zero=1,micro=2"),
            ("idle", "dp=2,ep=2,zero=1"),
            ("frozen", "dp=2,ep=2"),
            ("uneven", "dp=2,ep=2,micro=3"),
            ("mixture", "dp=2,ep=2,recompute=full"),
            ("mixture", "dp=2,ep=2,precision=bf16"),
        ],
    )


@pytest.mark.slow
def test_more_plans_on_two_ranks(world: Worlds) -> None:
    check_cells(world, 2, [("frozen", "dp=2,ep=2,zero=1"), ("mixture", "dp=2,ep=2,zero=2,micro=3,bucket=256")])


@pytest.mark.slow
def test_four_ranks(world: Worlds) -> None:
    """Copies of experts, shards of the copies, ranks without samples."""
    check_cells(
        world,
        4,
        [
            ("mixture", "dp=4,ep=2"),
            ("mixture", "dp=4,ep=4,micro=3"),
            ("mixture", "dp=4,ep=2,zero=1"),
            ("uneven", "dp=4,ep=2,zero=1,micro=3"),
            ("frozen", "dp=4,ep=2,zero=1,shard=2"),
        ],
    )


@pytest.mark.slow
def test_more_combinations(world: Worlds) -> None:
    check_cells(
        world,
        4,
        [
            ("masked", "dp=4,ep=2,zero=2,micro=3,bucket=256"),
            ("uneven", "dp=4,ep=4,micro=3"),
            ("idle", "dp=4,ep=4,zero=1"),
            ("mixture", "dp=4,ep=2,zero=1,precision=fp16"),
            ("mixture", "dp=4,ep=4,recompute=selective,micro=2"),
            ("frozen", "dp=4,ep=2,zero=1,recompute=full"),
            ("mixture", "dp=4,ep=2,offload=optimizer"),
            ("uneven", "dp=4,ep=2,zero=2,shard=2,recompute=full,micro=2"),
            ("mixture", "dp=4,ep=2,precision=bf16,zero=2"),
        ],
    )


@needs_transformers
@pytest.mark.slow
def test_mixtral(world: Worlds) -> None:
    check_cells(
        world,
        4,
        [("mixtral", "dp=4,ep=2"), ("mixtral", "dp=4,ep=4,zero=1,micro=2"), ("mixtral", "dp=4,ep=2,recompute=full")],
    )


@pytest.mark.slow
@needs_transformers
def test_mixtral_on_two_ranks(world: Worlds) -> None:
    check_cells(world, 2, [("mixtral", "dp=2,ep=2"), ("mixtral", "dp=2,ep=2,zero=1,micro=2")])


def test_on_shared_memory(world: Worlds) -> None:
    parity.check(world(2, "shm").run(expert_jobs.verified, [("mixture", "dp=2,ep=2,zero=1,backend=shm")])[0][0])


def test_verify_can_fail(world: Worlds) -> None:
    """Gradients halved on the way to and from experts: the last experts with tokens are named."""
    result = world(2).run(expert_jobs.wrong, "dp=2,ep=2")[0]
    assert not result.passed and result.phase == "backward"
    assert result.first_divergence == "blocks.1.experts.2.down", result


def test_losses_norms_weights_and_memory(world: Worlds) -> None:
    """Losses, norms and weights equal one device; a rank has its experts, and its share of the state."""
    base, own = expert_jobs.JOBS["idle"]
    expected = parity.serial(base, steps=3, changes=own)
    experts = sum(p.numel() for n, p in expected["weights"].items() if ".experts." in n)
    whole = sum(p.numel() for p in expected["weights"].values())
    trained = sum(p.numel() for n, p in expected["weights"].items() if not n.startswith(("frozen", "unused")))
    evaluated = world(1).run(expert_jobs.trained, "idle", "dp=1", 3)[0]["evaluated"]
    for plan in ("dp=4,ep=2", "dp=4,ep=2,zero=1"):
        results = world(4).run(expert_jobs.trained, "idle", plan, 3)
        for result in results:
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)
            assert result["names"] == list(expected["weights"]), "also what is away, in the order of the model"
            for name, value in expected["weights"].items():
                torch.testing.assert_close(result["weights"][name], value, rtol=1e-10, atol=1e-13, msg=name)
            assert result["elements"] == whole - experts // 2
            assert result["evaluated"] == pytest.approx(evaluated, rel=1e-12)
        states = [result["state"] for result in results]
        if "zero" in plan:
            assert sum(states) == trained, "every number of the state lies on one rank"
        else:
            assert states == [trained - experts // 2] * 4


def test_noise_and_own_loops(world: Worlds) -> None:
    expected = world(2).run(expert_jobs.noise, "dp=2")
    assert world(2).run(expert_jobs.noise, "dp=2,ep=2") == pytest.approx(expected, rel=1e-9)
    assert world(2).run(expert_jobs.noise, "dp=2,ep=2,zero=1") == pytest.approx(expected, rel=1e-9)
    losses = world(1).run(expert_jobs.own_loop, "dp=1", [5])[0]
    for result in world(2).run(expert_jobs.own_loop, "dp=2,ep=2", [4, 1]):
        assert result == pytest.approx(losses, rel=1e-12)


# -- checkpoints


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        (
            "frozen",
            ["dp=2,ep=2", "dp=1", "dp=2,ep=2,zero=1", "dp=4,ep=2", "dp=4,ep=2,zero=1", "dp=4,ep=4", "dp=2,zero=3"],
        ),
        pytest.param(
            "mixtral", ["dp=2,ep=2", "dp=1", "dp=2,ep=2,zero=1"], marks=[pytest.mark.slow, needs_transformers]
        ),
    ],
)
def test_checkpoints_fit_any_plan(world: Worlds, tmp_path: Path, name: str, plans: list[str]) -> None:
    """Each plan loads what the last one saved, and continues as it did."""
    for i, (plan, after) in enumerate(zip(plans, [*plans[1:], plans[0]], strict=True)):
        folder = str(tmp_path / str(i))
        saved = world(Plan.parse(plan).ranks).run(expert_jobs.saved, name, plan, folder, 2, timeout=IMPORTS)[0]
        for result in world(Plan.parse(after).ranks).run(expert_jobs.loaded, name, after, folder, 2, timeout=IMPORTS):
            assert result == pytest.approx(saved, rel=1e-10), (plan, after)


def test_weights_alone(world: Worlds, tmp_path: Path) -> None:
    base, own = expert_jobs.JOBS["mixture"]
    weights = parity.serial(base, steps=1, changes=own)["weights"]
    torch.save(weights, tmp_path / "w.pt")
    for plan in ("dp=2,ep=2", "dp=2,ep=2,zero=1"):
        for result in world(2).run(expert_jobs.weights_loaded, "mixture", plan, str(tmp_path / "w.pt")):
            assert all(torch.equal(result[name], value) for name, value in weights.items())


# -- guards


def test_replica_comparison_knows_expert_copies(world: Worlds) -> None:
    """Of four ranks, 0 and 2 have the first experts: two that differ have no majority. The router is on all four."""
    result = world(4).run(expert_jobs.voted, "dp=4,ep=2", 2, "blocks.0.experts.1.up.weight")
    assert all("blocks.0.experts.1.up.weight" in text and "ranks 0, 2" in text for text in result), result[0]
    result = world(4).run(expert_jobs.voted, "dp=4,ep=2", 3, "blocks.0.router.weight")
    assert all("blocks.0.router.weight" in text and "rank 3" in text for text in result), result[0]


def test_owner_of_a_nonfinite_expert_is_named(world: Worlds) -> None:
    for ranks, names in world(2).run(expert_jobs.originating_ranks, "dp=2,ep=2", 1, "blocks.0.experts.2.up.weight"):
        assert ranks == (1,) and names[0] == "blocks.0.experts.2.up.weight"


# -- what is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=4,ep=3", "ep=3 with dp=4\n.*4 % 3 != 0\n.*ep=4"),
        ("dp=2,ep=4", "ep=4 with dp=2\n.*2 % 4 != 0\n.*ep=2"),
        ("dp=8,zero=1,shard=2,ep=4", "ep=4 with shard=2\n.*2 % 4 != 0\n.*ep=2"),
    ],
)
def test_ep_divides_the_ranks(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){words}"):
        Plan.parse(text)


@pytest.mark.parametrize(
    "more",
    [
        "zero=3",
        "compress=fp16",
        "static=true",
        "chunk=2",
        "compile=true",
        "backend=threads",
        "tp=2",
        "pp=2",
        "cp=2",
        "tile=1x2",
    ],
)
def test_combinations_refused_with_ep(more: str) -> None:
    plan = Plan.parse(f"dp=4,ep=2,{more}")
    result = conflict(plan)
    assert result is not None and result.choices.startswith("ep with")
    with pytest.raises(PlanError, match="the engine does not run ep with"):
        check(plan)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("six", "ep=4 for 6 experts\n.*blocks.0.experts\n.*6 % 4 != 0\n.*ep=2"),
        ("listed", "no experts that can be sharded\n.*look like experts: experts\n.*drumline.Experts"),
        ("none", "the model has no experts that can be sharded"),
        ("buffer", "an expert keeps the buffer 'scale'\n.*blocks.0.experts.0"),
        ("norm", "an expert keeps statistics of a batch\n.*blocks.0.experts.0.norm"),
    ],
)
def test_models_refused_by_ep(world: Worlds, job: str, words: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){words}"):
        world(4).run(expert_jobs.refused, job, "dp=4,ep=4")


def test_unrecognized_experts_are_reported(world: Worlds) -> None:
    result = world(2).run(expert_jobs.left, "both", "dp=2,ep=2")[0]
    assert list(result) == ["other.experts"] and "not known as experts" in result["other.experts"]


def test_the_public_name() -> None:
    assert dl.Experts is Experts and "Experts" in dl.__all__
