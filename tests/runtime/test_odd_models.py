"""Parity of unusual models, in addition to the table of test_parity."""

from __future__ import annotations

from collections.abc import Callable

import odd_models
import parity
import pytest
from torch import nn
from world import World

from drumline.core.errors import PlanError

Worlds = Callable[[int], World]


@pytest.mark.parametrize("plan", ["dp=3", "dp=3,zero=3,recompute=full"])
@pytest.mark.parametrize("model", odd_models.ODD)
def test_odd_models(world: Worlds, model: type[nn.Module], plan: str) -> None:
    results = world(3).run(odd_models.run, model, plan)
    parity.check(results[0][0])
    messages = {text for _, texts in results for text in texts}
    if model is odd_models.Reads and "zero=3" in plan:
        assert all("every rank holds a full copy for a moment" in text for text in messages)
        assert messages
    else:
        assert messages == set()


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,micro=2", "pp=2,micro=2"])
def test_random_augmentation(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(odd_models.run_augmented, plan)[0])


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "tp=2"])
def test_an_optimizer_of_some_parameters(world: Worlds, plan: str) -> None:
    parity.check(world(2).run(odd_models.run_head_only, plan)[0])


def test_dropout_is_reported(world: Worlds) -> None:
    [[result, _], _] = world(2).run(odd_models.run, odd_models.Encoder, "dp=2")
    assert result.notes == ("dropout was set to 0",)


def test_scalar_parameter_is_not_sharded(world: Worlds) -> None:
    parity.check(world(2).run(odd_models.run, odd_models.Scalar, "dp=2")[0][0])
    with pytest.raises(PlanError, match="parameter 'scale' cannot be sharded\n  rule:  zero=3 cuts parameters along"):
        world(2).run(odd_models.run, odd_models.Scalar, "dp=2,zero=3")
