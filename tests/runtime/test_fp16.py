"""fp16 with dynamic loss scaling: an overflow halves the scale and runs the batch again; good steps double it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import small_jobs
import torch
from torch import nn
from world import World

from drumline.core.errors import GaveUp
from drumline.runtime.engine import initialize
from drumline.runtime.numerics.loss_scale import LossScale

Worlds = Callable[[int], World]
FIRST = 2.0**10
"""A scale at which the plain model does not overflow."""


class Steep(torch.autograd.Function):
    """The identity, whose gradient is in fp16 for a moment: it overflows where the loss scale is large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0] * 8192).to(torch.float16).to(gradients[0]) / 8192


class Normed(nn.Module):
    """A norm, whose buffers a batch that is run again must not move twice."""

    def __init__(self, steep: bool) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.steep = steep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        return self.head(Steep.apply(y) if self.steep else y)


def train(plan: str, steep: bool, window: int = 1000, steps: int = 5) -> dict[str, Any]:
    """The results of a few steps."""
    engine = initialize(small_jobs.make("mlp", model=lambda: Normed(steep), optimizer=small_jobs.sgd), plan)
    assert engine.scaler is not None
    engine.scaler.scale, engine.scaler.window = FIRST, window
    scales, losses = [engine.scaler.scale], []
    for batch in engine.data(steps):
        losses.append(engine.step(batch))
        scales.append(engine.scaler.scale)
    return {
        "scales": scales,
        "losses": losses,
        "overflows": engine.scaler.overflows,
        "steps": engine.steps,
        "position": engine.position,
        "buffers": {k: b.clone() for k, b in engine.model.named_buffers()},
        "weights": engine.whole_parameters(),
        "rate": engine.optimizer.param_groups[0]["lr"],
    }


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,micro=2", "dp=2,zero=1", "dp=2,zero=2,micro=2", "dp=2,zero=3"])
def test_overflow_changes_no_result(world: Worlds, plan: str) -> None:
    """With overflows or without: the same losses, weights, running statistics, steps and data position."""
    plan += ",precision=fp16"
    plain = world(2).run(train, plan, False)[0]
    for result in world(2).run(train, plan, True):
        assert result["overflows"] > 0
        assert result["scales"] == sorted(result["scales"], reverse=True)
        assert result["scales"][-1] == FIRST / 2 ** result["overflows"] < result["scales"][0]
        assert result["steps"] == result["position"] == 5
        assert result["losses"] == pytest.approx(plain["losses"], rel=2e-2)
        assert int(result["buffers"]["norm.num_batches_tracked"]) == 5 * (2 if "micro" in plan else 1)
        for kind in ("buffers", "weights"):
            for name, value in plain[kind].items():
                torch.testing.assert_close(result[kind][name], value, rtol=2e-2, atol=2e-2, msg=f"{kind} {name}")
    assert plain["overflows"] == 0


def test_same_scale_on_every_rank(world: Worlds) -> None:
    one, two = world(2).run(train, "dp=2,precision=fp16", True)
    assert one["scales"] == two["scales"]


def test_scale_grows_after_good_steps(world: Worlds) -> None:
    [result] = world(1).run(train, "dp=1,precision=fp16", False, 2)
    assert result["scales"] == [FIRST, FIRST, 2 * FIRST, 2 * FIRST, 4 * FIRST, 4 * FIRST]


def test_loss_scale() -> None:
    assert LossScale().scale == 2.0**16
    scale = LossScale(scale=4.0, window=2, least=1.0)
    scale.on_good_step()
    scale.on_overflow()
    assert (scale.scale, scale.good, scale.overflows) == (2.0, 0, 1)
    scale.on_good_step()
    assert scale.scale == 2.0
    scale.on_good_step()
    assert (scale.scale, scale.good) == (4.0, 0)
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == scale.state_dict()
    scale.scale = 2.0**24
    scale.on_good_step()
    scale.on_good_step()
    assert scale.scale == 2.0**24


def test_scale_below_the_minimum() -> None:
    scale = LossScale(scale=2.0, least=1.0)
    scale.on_overflow()
    with pytest.raises(
        GaveUp, match="gradients overflow in fp16 even at a loss scale of 0.5\n.*\n  try:   precision=bf16 or fp32"
    ):
        scale.on_overflow()
