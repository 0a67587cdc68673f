"""Stages balanced by measured times, which counted work does not show; all ranks choose alike."""

from __future__ import annotations

from collections.abc import Callable

import pipeline_functions as on
import pytest
import sleeping_jobs
import torch
from torch import nn
from world import World

from drumline.core.errors import PlanError
from drumline.partition.stage_boundaries import (
    BoundaryPrices,
    balanced_boundaries,
    cuttable_positions,
    modules_with_parameters,
    stage_entries,
)
from drumline.plans import Plan

Worlds = Callable[[int], World]
SLOW_LAST = (0.001, 0.001, 0.001, 0.02)


@pytest.mark.alone
def test_measured_times_decide(world: Worlds) -> None:
    plans = ["pp=2,micro=2", "pp=2,micro=2,split=auto", "pp=2,micro=2,split=measured"]
    for result in world(2).run(sleeping_jobs.begins, SLOW_LAST, plans):
        assert result[0] == result[1] != result[2] == ("layers.3",)


class Three(nn.Module):
    """Layers of 1 x 8, 8 x 8 and 8 x 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).sum()  # type: ignore[no-any-return]  # a tensor


def test_boundary_prices_decide() -> None:
    captured = on.graph_of(Three(), lambda m, given: m(given[0]), [torch.zeros(2, 1)])
    holders = modules_with_parameters(list(captured.placeholders("parameter")))
    assert [e.key[0] for e in stage_entries(captured.graph, holders)] == ["b", "c"]
    assert cuttable_positions(captured.graph, holders) == [e.position for e in stage_entries(captured.graph, holders)]

    def begins(*prices: float, per_byte: float = 0.0) -> str:
        return balanced_boundaries(captured.graph, 2, holders, BoundaryPrices(prices, per_byte))[0][0]

    assert begins(3.0, 1.0, 1.0) == "b" and begins(1.0, 1.0, 3.0) == "c"
    # two samples of eight floats go over either boundary, so a byte changes nothing but the sum
    assert begins(3.0, 1.0, 1.0, per_byte=1.0) == "b"
    with pytest.raises(PlanError, match="4 stages for a model of 3 layers"):
        balanced_boundaries(captured.graph, 4, holders, BoundaryPrices((1.0, 1.0, 1.0)))


class Moving(nn.Module):
    """A mean that the first layer reads moves behind the second one: no stage can begin between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.c(self.b(self.a(x - self.mean)))  # type: ignore[operator]  # a buffer
        self.mean.mul_(0.5)  # type: ignore[operator]  # a buffer
        return self.d(y).sum()  # type: ignore[no-any-return]  # a tensor


def test_stages_begin_at_allowed_places() -> None:
    """A buffer is written and read in one stage: where the prices would cut, no stage can begin."""
    captured = on.graph_of(Moving(), lambda m, given: m(given[0]), [torch.zeros(2, 4)])
    holders = modules_with_parameters(list(captured.placeholders("parameter")))
    names = {e.position: e.key[0] for e in stage_entries(captured.graph, holders)}
    assert list(names.values()) == ["a", "b", "c", "d"]
    assert [names[p] for p in cuttable_positions(captured.graph, holders)] == ["d"]
    assert balanced_boundaries(captured.graph, 2, holders, BoundaryPrices((1.0,) * 5, 0.0)) == [("d", 0)]


def test_plan_notation() -> None:
    assert Plan.parse("pp=2,split=auto") == Plan(pp=2)
    measured = Plan.parse("pp=2,split=measured")
    assert str(measured) == "dp=1,pp=2,split=measured" and measured.begins == ()
    assert Plan.parse("pp=3,split=a+b").begins == ("a", "b")
    with pytest.raises(PlanError, match=r"split=measured\+a"):
        Plan.parse("pp=2,split=measured+a")
