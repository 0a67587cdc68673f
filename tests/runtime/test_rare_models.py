"""Parity of models with rare features: complex weights, random numbers in the forward, tensors in lists."""

from __future__ import annotations

from collections.abc import Callable

import parity
import pytest
import rare_models
import torch
from torch import nn
from world import World

from drumline.core.errors import PlanError, TraceError
from drumline.runtime.verification.modes import without_randomness

Worlds = Callable[[int], World]
NOTE = "random draws of the model were replaced by the middle of their range"


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2,micro=2", "tp=2", "pp=2,micro=2"])
def test_complex_weights(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(rare_models.run, rare_models.Spectral, plan)[0])


def test_two_dtypes_in_one_layer_are_refused(world: Worlds) -> None:
    with pytest.raises(PlanError, match="'first.weight' is float64 and 'weight' is complex128, and they are of one"):
        world(2).run(rare_models.run, rare_models.Spectral, "dp=2,zero=3")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,recompute=full", "tp=2", "pp=2,micro=2"])
def test_random_draws_are_made_deterministic(world: Worlds, plan: str) -> None:
    result = world(2).run(rare_models.run, rare_models.Drawing, plan)[0]
    parity.check(result)
    assert result.notes == (NOTE,)


def test_modes_apply_to_recomputation(world: Worlds) -> None:
    """In a recomputed block dropout is off and float32 becomes float64, too."""
    result = world(2).run(rare_models.run, rare_models.Again, "dp=2,recompute=full")[0]
    parity.check(result)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2"])
def test_mask_on_fake_tensors(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(rare_models.run, rare_models.Causal, plan)[0])


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro=2"])
def test_tensors_in_lists(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(rare_models.run, rare_models.Listed, plan)[0])


def test_parameter_in_a_list_is_refused(world: Worlds) -> None:
    with pytest.raises(TraceError, match="uses a tensor that is no parameter, buffer or attribute"):
        world(2).run(rare_models.run, rare_models.Alias, "tp=2")


def test_draws_are_replaced_by_the_middle() -> None:
    """In a step, not in the data; a user's own generator is not touched."""
    x = torch.ones(4)
    with without_randomness(nn.Linear(2, 2)) as randomness:
        assert not torch.randn_like(x).eq(0).any()
        assert not randomness.drawn
        randomness.in_step = True
        assert torch.randn(2, 3).eq(0).all() and torch.randn_like(x).eq(0).all()
        assert torch.rand(2).eq(0.5).all() and torch.rand_like(x).eq(0.5).all()
        assert torch.randint(10, (3,)).tolist() == [4, 4, 4]
        assert torch.randint(2, 5, (2,)).tolist() == [3, 3]
        assert torch.randint(low=2, high=5, size=(2,)).tolist() == [3, 3]
        assert torch.randint_like(x, 10).eq(4).all()
        assert x.clone().normal_(3, 1).eq(3).all() and x.clone().uniform_(2, 4).eq(3).all()
        assert x.clone().exponential_(2.0).eq(0.5).all()
        assert x.clone().bernoulli_(0.2).eq(0).all() and x.clone().bernoulli_(0.9).eq(1).all()
        assert torch.bernoulli(torch.tensor([0.1, 0.8])).tolist() == [0, 1]
        assert not torch.randn(4, generator=torch.Generator().manual_seed(1)).eq(0).any()
    assert randomness.notes == {NOTE}
    assert not torch.randn(4).eq(0).any()
