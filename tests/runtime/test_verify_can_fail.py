"""Verification can fail: injected faults are detected, and located by module and phase."""

from __future__ import annotations

from collections.abc import Callable

import broken_jobs
import pytest
import torch
from world import World

from drumline.runtime.verification.comparison import largest_error
from drumline.runtime.verification.tolerances import BOUNDS, discount_small_gradients, rounded
from drumline.runtime.verification.verify import Verification

Worlds = Callable[[int], World]


def first_result(results: list[Verification | None]) -> Verification:
    assert results[0] is not None
    assert results[1:] == [None] * (len(results) - 1)
    return results[0]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,micro=2", "dp=3,recompute=full"])
def test_passes_without_faults(world: Worlds, plan: str) -> None:
    result = first_result(world(broken_jobs.Plan.parse(plan).ranks).run(broken_jobs.check, "", 1, plan))
    assert result.passed
    assert (result.first_divergence, result.phase) == (None, "")
    assert (
        result.reference
        == f"one device, the same {'2 micro-batches' if 'micro' in plan else '1 micro-batch'} of each batch"
    )


def test_single_rank_has_no_faulty_peer(world: Worlds) -> None:
    assert first_result(world(1).run(broken_jobs.check, "forward", 0, "dp=1")).passed


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
def test_faults_on_one_rank(
    world: Worlds, fault: str, module: str, phase: str, plan: str, clip: float | None, rank: int
) -> None:
    result = first_result(world(2).run(broken_jobs.check, fault, rank, plan, clip))
    assert not result.passed
    assert result.errors["float64"] > 1e-10
    assert (result.first_divergence, result.phase) == (module, phase)


def test_fault_in_a_weight_gradient(world: Worlds) -> None:
    result = first_result(world(2).run(broken_jobs.check, "weight", 1, "dp=2"))
    assert not result.passed
    assert (result.first_divergence, result.phase) == ("middle", "backward")


def test_fault_in_the_update(world: Worlds) -> None:
    result = first_result(world(2).run(broken_jobs.check, "update", 1, "dp=2,zero=3"))
    assert not result.passed
    assert result.phase == "update"
    assert result.parts["float64"]["gradients"] <= 1e-10 < result.parts["float64"]["parameters"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=3,micro=2", "dp=2,zero=3,recompute=full"])
def test_norms_without_synchronized_statistics(world: Worlds, plan: str) -> None:
    ranks = broken_jobs.Plan.parse(plan).ranks
    assert first_result(world(ranks).run(broken_jobs.check_norm, plan, True)).passed
    result = first_result(world(ranks).run(broken_jobs.check_norm, plan, False))
    assert not result.passed
    assert (result.first_divergence, result.phase) == ("norm", "forward")


@pytest.mark.parametrize("plan", ["dp=2,micro=2", "dp=3,zero=3"])
def test_lost_micro_batch(world: Worlds, plan: str) -> None:
    """The modules agree; the loss computed from their outputs does not."""
    result = first_result(world(broken_jobs.Plan.parse(plan).ranks).run(broken_jobs.check_lost_micro, plan))
    assert not result.passed
    assert (result.first_divergence, result.phase) == ("(loss)", "backward")


def test_small_gradients_count_less_after_an_update() -> None:
    """Adam divides a gradient by its size, and its rounding with it; tensors without a gradient count in full."""
    largest = {"w": torch.tensor([1.0, 1e-3, 1e-6, 1e-13, 0.0]), "v": torch.ones(1)}
    reference = {"w": torch.ones(5), "v": torch.ones(1), "no gradient": torch.ones(1)}
    final = {name: value + 0.5 for name, value in reference.items()}
    off = {k: (p - reference[k]).tolist() for k, p in discount_small_gradients(final, reference, largest).items()}
    assert off["w"] == pytest.approx([0.5, 0.5, 0.5e-3, 0.0, 0.5e-4], rel=1e-6, abs=1e-12)
    assert off["v"] == off["no gradient"] == [0.5]
    final["v"] = torch.tensor([float("nan")])
    assert discount_small_gradients(final, reference, largest)["v"].isnan().all()


def test_rounding_in_float32_follows_from_float64() -> None:
    """Beyond the bound of float64 it is an error, and explains nothing."""
    assert rounded(1e-12, "float32") == pytest.approx(5.4e-4, rel=0.01)
    assert rounded(2e-10, "float32") == rounded(1e-12, "bfloat16") == 0.0


def test_a_forgotten_weight_decay_of_a_zero_gradient_is_found() -> None:
    """One step of AdamW at its default decay and a rate of 1e-3: rows of an embedding that no sample reads."""
    before = torch.linspace(0.5, 1, 8, dtype=torch.float64)
    reference, final = {"rows": before * (1 - 1e-3 * 1e-2), "read": before}, {"rows": before, "read": before}
    largest = {"rows": torch.zeros(8), "read": torch.ones(8)}
    assert largest_error(discount_small_gradients(final, reference, largest), reference) > BOUNDS["float64"]
