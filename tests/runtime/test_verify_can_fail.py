"""A proof that cannot fail proves nothing: faults put in on purpose are found, and named by module and phase."""

from __future__ import annotations

from collections.abc import Callable

import broken_jobs
import pytest
from world import World

from drumline.runtime.verification.verify import Verification

Worlds = Callable[[int], World]


def result(results: list[Verification | None]) -> Verification:
    assert results[0] is not None
    assert results[1:] == [None] * (len(results) - 1)
    return results[0]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,micro=2", "dp=3,recompute=full"])
def test_without_a_fault_it_passes(world: Worlds, plan: str) -> None:
    found = result(world(broken_jobs.Plan.parse(plan).ranks).run(broken_jobs.check, "", 1, plan))
    assert found.passed
    assert (found.first_divergence, found.phase) == (None, "")
    assert (
        found.reference
        == f"one device, the same {'2 micro-batches' if 'micro' in plan else '1 micro-batch'} of each batch"
    )


def test_one_rank_has_no_fault_to_find(world: Worlds) -> None:
    assert result(world(1).run(broken_jobs.check, "forward", 0, "dp=1")).passed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("plan", "clip"), [("dp=2", None), ("dp=2,zero=3,micro=2", None), ("dp=2,recompute=full", 0.5)]
)
@pytest.mark.parametrize(
    ("fault", "module", "phase"),
    [
        ("forward", "middle", "forward"),
        ("tiny", "middle", "forward"),
        ("backward", "middle", "backward"),
    ],
)
def test_faults_of_one_rank(
    world: Worlds, fault: str, module: str, phase: str, plan: str, clip: float | None, rank: int
) -> None:
    found = result(world(2).run(broken_jobs.check, fault, rank, plan, clip))
    assert not found.passed
    assert found.errors["float64"] > 1e-10
    assert (found.first_divergence, found.phase) == (module, phase)


def test_a_fault_in_a_weights_gradient(world: Worlds) -> None:
    found = result(world(2).run(broken_jobs.check, "weight", 1, "dp=2"))
    assert not found.passed
    assert (found.first_divergence, found.phase) == ("middle", "backward")


def test_a_fault_in_the_update(world: Worlds) -> None:
    found = result(world(2).run(broken_jobs.check, "update", 1, "dp=2,zero=3"))
    assert not found.passed
    assert found.phase == "update"
    assert found.parts["float64"]["gradients"] <= 1e-10 < found.parts["float64"]["parameters"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=3,micro=2", "dp=2,zero=3,recompute=full"])
def test_norms_that_do_not_span_the_ranks(world: Worlds, plan: str) -> None:
    ranks = broken_jobs.Plan.parse(plan).ranks
    assert result(world(ranks).run(broken_jobs.check_norm, plan, True)).passed
    found = result(world(ranks).run(broken_jobs.check_norm, plan, False))
    assert not found.passed
    assert (found.first_divergence, found.phase) == ("norm", "forward")


@pytest.mark.parametrize("plan", ["dp=2,micro=2", "dp=3,zero=3"])
def test_a_loss_that_is_not_counted(world: Worlds, plan: str) -> None:
    """The modules agree, what is made of their output does not."""
    found = result(world(broken_jobs.Plan.parse(plan).ranks).run(broken_jobs.check_lost_micro, plan))
    assert not found.passed
    assert (found.first_divergence, found.phase) == ("(loss)", "backward")
