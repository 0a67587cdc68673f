"""`verify` names the layer where a split model is wrong: a halo, a tied gradient, a norm's reduction, a loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import split_faults
from world import World

from drumline.runtime.verification.verify import Verification

Worlds = Callable[[int], World]


def verified(world: Worlds, fault: str, where: str, job: str, plan: str, **changes: Any) -> Verification:
    ranks = split_faults.Plan.parse(plan).ranks
    results = world(ranks).run(split_faults.run, fault, where, job, plan, changes, timeout=120)
    assert isinstance(results[0], Verification)
    assert results[1:] == [None] * (ranks - 1)
    return results[0]


def named(result: Verification) -> tuple[bool, str | None, str]:
    return result.passed, result.first_divergence, result.phase


def test_faulty_halo(world: Worlds) -> None:
    assert named(verified(world, "halo", "up.3", "groups", "tile=2x1")) == (False, "up.3", "forward")


def test_faulty_tied_gradient(world: Worlds) -> None:
    assert named(verified(world, "tied", "", "masked", "pp=2,micro=2", clip=None)) == (False, "token", "backward")


def test_faulty_norm_reduction(world: Worlds) -> None:
    assert named(verified(world, "statistics", "bottom.1", "groups", "tile=1x2")) == (False, "bottom.1", "forward")


def test_faulty_loss_scale(world: Worlds) -> None:
    assert named(verified(world, "scale", "1", "mlp", "pp=2,micro=2", clip=None)) == (False, "(loss)", "backward")


@pytest.mark.parametrize("run", [split_faults.run, split_faults.run_beside_float64])
@pytest.mark.parametrize(
    ("fault", "where", "job", "plan", "name"),
    [
        ("halo", "up.3", "groups", "tile=2x1", ("up.3", "forward")),
        ("tied", "", "masked", "pp=2,micro=2", ("token", "backward")),
        ("statistics", "bottom.1", "groups", "tile=1x2", ("bottom.1", "forward")),
        ("scale", "1:1.2", "mlp", "pp=2,micro=2", ("(loss)", "backward")),
    ],
)
def test_faults_in_half_precision(
    world: Worlds, run: Callable[..., Any], fault: str, where: str, job: str, plan: str, name: tuple[str, str]
) -> None:
    """The same four, named as well where float64 sees them and where only the run in bfloat16 has them."""
    result = world(2).run(run, fault, where, job, f"{plan},precision=bf16", {"clip": None}, timeout=120)[0]
    assert named(result) == (False, *name), result
    assert result.errors["bfloat16"] > result.bounds["bfloat16"] >= 5e-2
    assert (result.errors["float64"] > 1e-10) == (run is split_faults.run)


def test_without_a_fault(world: Worlds) -> None:
    assert named(verified(world, "", "", "groups", "tile=2x1")) == (True, None, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "where", "job", "plan", "name"),
    [
        ("halo", "stem", "resnet", "tile=2x1", "stem"),
        ("halo", "blocks.1.conv1", "resnet", "pp=2,micro=2,tile=1x2", "blocks.1.conv1"),
        ("halo", "body.4", "convnet", "tile=2x2", "body.4"),
        ("statistics", "body.5", "convnet", "tile=1x2", "body.5"),
        ("statistics", "norm", "resnet", "dp=2,tile=2x1", "norm"),
        ("statistics", "blocks.0.norm1", "resnet", "dp=2,tp=2", "blocks.0.norm1"),
        ("tied", "", "gpt", "pp=2,micro=3,tp=2", "token"),
        ("tied", "", "t5", "pp=2,micro=2,schedule=zero-bubble,split=decoder.block.0", "shared"),
        ("scale", "3", "masked", "dp=2,pp=2,micro=3", "(loss)"),
    ],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_faults_in_other_layers(
    world: Worlds, fault: str, where: str, job: str, plan: str, name: str, clip: float | None
) -> None:
    assert named(verified(world, fault, where, job, plan, clip=clip))[:2] == (False, name)
