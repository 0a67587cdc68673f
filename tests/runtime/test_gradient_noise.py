"""The gradient noise scale on linear regression, where it is known in closed form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import deepspeed_functions as on_ranks
import pytest
import torch
from world import World

from drumline.core.errors import JobError, PlanError
from drumline.plans import Plan
from drumline.runtime.learning_rates.gradient_noise import GradientNorms, NoiseScale, NoiseScaleAverage, estimate_scale

D, SIGMA = 5, 2.0
DELTA = torch.tensor([0.5, -0.5, 0.5, 0.3, -0.4], dtype=torch.float64)
"""The model's weights relative to the optimum."""
TRUTH = (D + 1) + SIGMA**2 * D / float(DELTA.square().sum())
"""Samples x of N(0, 1), y = w x + noise, squared error: tr(Sigma) = (D + 1) |delta|^2 + D sigma^2, |G|^2 = |delta|^2."""


def measured(sizes: list[int], batches: int, seed: int = 0) -> list[GradientNorms]:
    """The norms of `batches` batches, in parts of these sizes."""
    g = torch.Generator().manual_seed(seed)
    estimate = []
    for _ in range(batches):
        x = torch.randn(sum(sizes), D, generator=g, dtype=torch.float64)
        noise = SIGMA * torch.randn(sum(sizes), generator=g, dtype=torch.float64)
        gradients = x * (x @ DELTA - noise)[:, None]
        parts = tuple(float(p.mean(0).square().sum()) for p in gradients.split(sizes))
        estimate.append(GradientNorms(tuple(sizes), parts, float(gradients.mean(0).square().sum())))
    return estimate


@pytest.mark.parametrize("sizes", [[8] * 8, [16] * 4, [32, 32], [1] * 16, [5, 16, 11, 32], [1, 63]], ids=str)
def test_closed_form(sizes: list[int]) -> None:
    """Within 10% from 2000 batches, however they are cut, and within three standard errors."""
    estimate = estimate_scale(measured(sizes, 2000), 64)
    assert estimate.scale == pytest.approx(TRUTH, rel=0.1)
    assert abs(estimate.scale - TRUTH) < 3 * (estimate.high - estimate.scale)


def test_both_estimates_are_unbiased() -> None:
    norms = measured([5, 16, 11], 4000)
    square, variance = float(DELTA.square().sum()), (D + 1) * float(DELTA.square().sum()) + D * SIGMA**2
    assert math.fsum(n.square for n in norms) / len(norms) == pytest.approx(square, rel=0.05)
    assert math.fsum(n.variance for n in norms) / len(norms) == pytest.approx(variance, rel=0.05)


def test_moving_averages() -> None:
    """Old batches are forgotten: the scale follows the model. The state survives JSON."""
    average = NoiseScaleAverage(decay=0.9)
    assert average.scale == math.inf
    for _ in range(5):
        average.add(GradientNorms((1, 1), (100.0, 100.0), 60.0))  # variance 80, square 20
    assert average.scale == pytest.approx(4.0)
    again = NoiseScaleAverage(decay=0.9)
    again.load_state_dict(json.loads(json.dumps(average.state_dict())))
    for a in (average, again):
        for _ in range(200):
            a.add(GradientNorms((1, 1), (30.0, 30.0), 20.0))  # variance 20, square 10
    assert average.scale == pytest.approx(2.0, rel=1e-6)
    assert again.scale == average.scale
    assert again.count == 205


def test_noise_that_drowns_the_gradient() -> None:
    estimate = estimate_scale([GradientNorms((1, 1), (10.0, 10.0), 4.0)], 8)
    assert estimate.scale == math.inf
    assert (
        str(estimate)
        == "gradient noise scale: the noise drowns the gradient (1 batches measured). Larger batches pay off"
    )


def test_no_noise() -> None:
    estimate = estimate_scale([GradientNorms((2, 2), (4.0, 4.0), 4.0)] * 3, 8)
    assert (estimate.scale, estimate.low, estimate.high) == (0.0, 0.0, 0.0)
    assert estimate.sample_factor == math.inf


def test_text() -> None:
    estimate = NoiseScale(314.0, 250.0, 400.0, 20, 64)
    assert (estimate.sample_factor, estimate.step_factor) == (1 + 64 / 314, 1 + 314 / 64)
    assert str(estimate).startswith(
        "gradient noise scale: about 310 samples, 250 to 400 (20 batches measured). Batches up to about 310 still pay off. "
        "With 64 samples per batch, training takes about 1.2x the minimum number of samples and 5.9x the minimum number of "
        "steps."
    )


@pytest.mark.parametrize(("sizes", "parts"), [((4,), (1.0,)), ((4, 4), (1.0,)), ((4, 0), (1.0, 1.0)), ((), ())])
def test_invalid_parts(sizes: tuple[int, ...], parts: tuple[float, ...]) -> None:
    with pytest.raises(JobError, match="at least two parts"):
        GradientNorms(sizes, parts, 1.0)
    with pytest.raises(JobError, match="0 < decay <= 1"):
        NoiseScaleAverage(decay=1.5)


PLANS = ["dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2,micro=2", "dp=2,zero=3", "dp=3,micro=2", "dp=2,precision=fp16"]


def test_under_every_plan(world: Callable[[int], World]) -> None:
    """The same value under every plan and on every rank, within three standard errors; training state is unchanged."""
    [(scale, error, text, kept)] = world(1).run(on_ranks.noise, "dp=1", 4)
    assert kept
    assert abs(scale - TRUTH) < 3 * error < 0.5 * TRUTH
    assert "20 batches measured" in text
    for plan in PLANS[1:]:
        for estimate, _, _, same in world(int(plan[3])).run(on_ranks.noise, plan, 4):
            assert same, plan
            assert estimate == pytest.approx(scale, rel=1e-9 if "fp16" not in plan else 0.02), plan


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2", "dp=2,tp=2"])
def test_split_models(world: Callable[[int], World], plan: str) -> None:
    """Parameters on several ranks (norms, tied weights) are counted once."""
    [(scale, _)] = world(1).run(on_ranks.noise_of_parts, "dp=1")
    assert 0 < scale < math.inf
    for estimate, kept in world(Plan.parse(plan).ranks).run(on_ranks.noise_of_parts, plan):
        assert kept and estimate == pytest.approx(scale, rel=1e-9)


def test_more_parts_reduce_the_error(world: Callable[[int], World]) -> None:
    [(_, few, _, _)] = world(1).run(on_ranks.noise, "dp=1", 2)
    [(scale, many, _, _)] = world(1).run(on_ranks.noise, "dp=1", 12)
    assert abs(scale - TRUTH) < 3 * many
    assert many < few


def test_compressed_gradients_have_no_noise_scale(world: Callable[[int], World]) -> None:
    with pytest.raises(PlanError, match="gradient noise with compress=powersgd"):
        world(2).run(on_ranks.noise, "dp=2,compress=powersgd", 4)
    with pytest.raises(JobError, match="at least two parts"):
        world(1).run(on_ranks.noise, "dp=1", 1)
