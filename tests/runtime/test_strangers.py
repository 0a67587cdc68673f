"""Parity of models as others write them, each with what once broke a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_jobs
import parity
import pytest
import strangers
import torch
import torch.nn.functional as F
from world import World

from drumline.core.errors import JobError, TraceError
from drumline.runtime.verification.modes import Float64Mode
from drumline.tracing.fake import fake_mode
from drumline.tracing.grouped_matmul import GroupedMatmul, patch_grouped_mm

Worlds = Callable[[int], World]
needs_transformers = pytest.mark.skipif(bool(hf_jobs.missing()), reason=hf_jobs.missing())


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,zero=3,recompute=full,micro=2"])
def test_weights_that_are_read_from_elsewhere_are_gathered(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(strangers.run, strangers.Reading, plan)[0])


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2"])
def test_a_share_of_nought_drops_no_layer(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(strangers.run, strangers.Dropping, plan)[0])


def test_a_model_that_drops_layers_is_refused_with_the_line(world: Worlds) -> None:
    with pytest.raises(TraceError) as e:
        world(2).run(strangers.run_dropping, "tp=2")
    assert "torch.rand([]) < self.layerdrop" in e.value.where


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,micro=2"])
def test_grouped_products(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(strangers.run, strangers.Grouped, plan)[0])


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_scripted_functions_compute_in_float64_too(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(strangers.run, strangers.Scripted, plan)[0])


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_an_output_that_leads_nowhere_has_no_gradient(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(strangers.run, strangers.Moments, plan)[0])


def test_a_bias_after_a_sum_over_channels(world: Worlds) -> None:
    parity.check(world(2).run(strangers.run, strangers.Sound, "tp=2")[0])


def test_a_constructor_that_copies_warns_of_nothing(world: Worlds) -> None:
    parity.check(world(2).run(strangers.run, strangers.Copies, "tp=2")[0])


@needs_transformers
@pytest.mark.parametrize("plan", ["dp=2,recompute=full", "dp=2,zero=3,recompute=full"])
def test_keys_that_are_kept_are_not_added_to_again(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(strangers.run, strangers.llama, plan)[0])


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,recompute=full", "tp=2", "pp=2,micro=2"])
@pytest.mark.parametrize("model", [strangers.mixtral, strangers.bart])
def test_models_of_the_library(world: Worlds, model: Any, plan: str) -> None:
    parity.check(world(2).run(strangers.run, model, plan, timeout=120)[0])


def test_what_one_device_cannot_do_is_told_by_its_micro_batch(world: Worlds) -> None:
    with pytest.raises(JobError, match="one device, in micro-batch 1 of step 3, which has 1 sample, raised ValueError"):
        world(2).run(strangers.run_single, "dp=2,micro=3")


def test_a_grouped_product_is_torchs_own() -> None:
    """Groups that are empty, and rows of no group; the gradients as well; without values, its shape."""
    rows, matrices = torch.randn(7, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    made = GroupedMatmul.apply(rows, matrices, ends)
    want = torch.cat([rows[:2] @ matrices[0], rows[2:6] @ matrices[2], torch.zeros(1, 5)])
    assert torch.allclose(made, want)
    direction = torch.randn(7, 5)
    mine = torch.autograd.grad(made, (rows, matrices), direction)
    theirs = torch.autograd.grad(want, (rows, matrices), direction)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, theirs, strict=True))
    patch_grouped_mm()
    double = F.grouped_mm(rows.double(), matrices.double(), offs=ends)
    assert double.dtype == torch.float64 and torch.allclose(double, want.double(), atol=1e-6)
    with fake_mode():
        fake = F.grouped_mm(torch.empty(7, 4), torch.empty(3, 4, 5), offs=torch.empty(3, dtype=torch.int32))
    assert fake.shape == (7, 5)


def test_exact_leaves_scripts_as_they_were() -> None:
    assert strangers.scripted_scale(6, 3).dtype == torch.float32
    with Float64Mode(), Float64Mode():
        assert strangers.scripted_scale(6, 3).dtype == torch.float64
    assert strangers.scripted_scale(6, 3).dtype == torch.float32


class _Rounds(torch.optim.Optimizer):
    """Computes in float32 by its own will."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data -= 1e-3 * p.grad.float().to(p.dtype)


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_exact_leaves_the_steps_that_torchs_optimizers_count(base: type[torch.optim.Optimizer]) -> None:
    """A GPU's fused kernels read them as float32, whatever they are."""
    mine = type("Mine", (base,), {"step": lambda self: base.step(self)})
    for kind in (base, mine):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        p.grad = torch.full_like(p, 1 / 3)
        optimizer = kind([p])
        with Float64Mode():
            optimizer.step()
            assert torch.ones(1).float().dtype == torch.float64
        assert optimizer.state[p]["step"].dtype == torch.float32


def test_exact_reaches_the_optimizer_of_a_user() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.full_like(p, 1 / 3)
    with Float64Mode():
        _Rounds([p]).step()
    assert torch.equal(p.detach(), torch.ones(3, dtype=torch.float64) - 1e-3 * p.grad)
