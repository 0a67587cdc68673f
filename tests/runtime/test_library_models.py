"""Parity of models as in popular libraries, each with a feature that once broke a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_jobs
import library_models
import parity
import pytest
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
def test_weights_read_outside_their_layer_are_gathered(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(library_models.run, library_models.Reading, plan)[0])


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2"])
def test_layer_drop_rate_zero(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(library_models.run, library_models.Dropping, plan)[0])


def test_layer_drop_is_refused_with_the_line(world: Worlds) -> None:
    with pytest.raises(TraceError) as e:
        world(2).run(library_models.run_dropping, "tp=2")
    assert "torch.rand([]) < self.layerdrop" in e.value.where


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,micro=2"])
def test_grouped_matmuls(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(library_models.run, library_models.Grouped, plan)[0])


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_scripted_functions_compute_in_float64_too(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(library_models.run, library_models.Scripted, plan)[0])


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,micro=2"])
def test_numbers_made_of_shapes_and_of_the_default_dtype(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(library_models.run, library_models.Spanned, plan)[0])


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,sync=local:2"])
def test_both_runs_read_the_same_data(world: Worlds, plan: str) -> None:
    """Data that is made of doubles stays float32 where the model computes in float64."""
    result = world(2).run(library_models.run_doubles, plan)[0]
    assert result.passed and result.errors["float64"] <= 1e-10, result


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_unused_output_has_no_gradient(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(library_models.run, library_models.Moments, plan)[0])


def test_bias_after_a_split_channel_sum(world: Worlds) -> None:
    parity.check(world(2).run(library_models.run, library_models.Sound, "tp=2")[0])


def test_copying_constructor_does_not_warn(world: Worlds) -> None:
    parity.check(world(2).run(library_models.run, library_models.Copies, "tp=2")[0])


@needs_transformers
@pytest.mark.parametrize("plan", ["dp=2,recompute=full", "dp=2,zero=3,recompute=full"])
def test_recomputation_does_not_extend_the_key_cache(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(library_models.run, library_models.llama, plan)[0])


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,recompute=full", "tp=2", "pp=2,micro=2"])
@pytest.mark.parametrize("model", [library_models.mixtral, library_models.bart])
def test_transformers_models(world: Worlds, model: Any, plan: str) -> None:
    parity.check(world(2).run(library_models.run, model, plan, timeout=120)[0])


def test_failure_of_the_reference_names_its_micro_batch(world: Worlds) -> None:
    with pytest.raises(JobError, match="one device, in micro-batch 1 of step 3, which has 1 sample, raised ValueError"):
        world(2).run(library_models.run_single, "dp=2,micro=3")


def test_grouped_matmul_equals_torch() -> None:
    """With empty groups and rows of no group; gradients too; on fake tensors the shape."""
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


def test_float64_mode_restores_scripts() -> None:
    assert library_models.scripted_scale(6, 3).dtype == torch.float32
    with Float64Mode(), Float64Mode():
        assert library_models.scripted_scale(6, 3).dtype == torch.float64
    assert library_models.scripted_scale(6, 3).dtype == torch.float32


class _Rounds(torch.optim.Optimizer):
    """Computes in float32 explicitly."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data -= 1e-3 * p.grad.float().to(p.dtype)


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_float64_mode_keeps_optimizer_step_counters(base: type[torch.optim.Optimizer]) -> None:
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


def test_float64_mode_applies_to_user_optimizers() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.full_like(p, 1 / 3)
    with Float64Mode():
        _Rounds([p]).step()
    assert torch.equal(p.detach(), torch.ones(3, dtype=torch.float64) - 1e-3 * p.grad)
