"""The summary of what a plan could not split: by the engine, by `train` and by `verify`, in few lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import bad_splits
import pytest
import small_jobs
import torch
from torch import nn
from world import World

from drumline.plans import Plan
from drumline.reports.split_summary import SplitSummary, split_summary
from drumline.runtime.engine import initialize
from drumline.runtime.training.train import train
from drumline.runtime.verification.verify import verify

Worlds = Callable[[int], World]


class Summing(nn.Module):
    """A convolution, sums along its columns that no rule can split, and a linear layer over all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2 * 8 * 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.conv(x).cumsum(2), 1))  # type: ignore[no-any-return]  # a tensor


def summing_job() -> Any:
    """On images of 8 x 8."""
    return small_jobs.make("convnet", model=Summing)


def trained(name: str, plan: str) -> tuple[list[str], SplitSummary, Any]:
    """On every rank: the first messages of `train`, the engine's summary, and the result of `train`."""
    messages: list[str] = []
    engine = initialize(summing_job() if name == "summing" else small_jobs.make(name), plan)
    result = train(engine, lambda e: messages.append(e["message"]) if "message" in e else None, steps=1, evaluate=False)
    assert engine.strategy.summary is not None
    return messages, engine.strategy.summary, result


def proved(name: str, plan: str) -> Any:
    """On every rank: verify; the first rank gets the result."""
    return verify(summing_job() if name == "summing" else bad_splits.make(name), Plan.parse(plan), steps=2)


def test_gathered_tensors_are_reported(world: Worlds) -> None:
    (messages, division, result), (silent, same, _) = world(2).run(trained, "summing", "tile=2x1")
    assert list(division.gathered) == ["rows"] and not division.left and not division.stages
    assert division.gathered["rows"] == {"aten.cumsum.default": ("",)}
    assert messages == ["tile rows gathers tensors for cumsum (the model)"]
    assert silent == [] and same == division == result["division"]


def test_unsplit_parameters_are_reported(world: Worlds) -> None:
    (messages, division, _), _ = world(2).run(trained, "gpt", "tp=2")
    assert division.left["norm.weight"] and "place.weight" in division.left
    assert messages[0].startswith(f"tp keeps {len(division.left)} parameters whole: ") and len(messages) == 1


def test_stage_starts_are_reported(world: Worlds) -> None:
    (messages, division, result), _ = world(2).run(trained, "mlp", "pp=2,micro=2")
    assert messages == [f"stages begin at {division.stages[0]}"]
    assert len(result["lanes"]) == 1 and result["lanes"][0].seconds >= result["lanes"][0].busy > 0


def test_verify_reports_the_summary(world: Worlds) -> None:
    result = world(2).run(proved, "summing", "tile=2x1", timeout=120)[0]
    assert result.passed and list(result.division.gathered) == ["rows"]
    assert json.loads(json.dumps(dataclasses.asdict(result)))["division"]["gathered"]["rows"]


def test_tiles_without_a_halo_have_a_stated_bound(world: Worlds) -> None:
    """Exact in float64 with halos; without, losses are close and the note says how close."""
    result = world(2).run(proved, "convnet", "tile=2x1,halo=false", timeout=120)[0]
    assert result.passed and result.errors["float64"] <= 1e-10
    assert result.bounds["float32"] == 0.25 and 1e-4 < result.errors["float32"] <= 0.25
    assert result.plan == "dp=1,tile=2x1,halo=false"
    assert any(n.startswith("halo=false is approximate: loss error") and "at most 0.25" in n for n in result.notes)
    assert not Plan.parse(result.plan).exact


def test_summary_is_short() -> None:
    left = {f"blocks.{i}.norm.weight": "no matmul is split by it" for i in range(40)} | {
        "words.weight": "a table of 11 rows",
        "odd.weight": "7 outputs: 7 % 2 != 0",
        "other.weight": "9 outputs: 9 % 2 != 0",
    }
    gathered = {
        "rows": {f"aten.op{i}.default": ["", "a", "a", "b", "c", "d"] for i in range(5)},
        "columns": {},
        "tp": {"<function gather at 0x7f>": ["x"]},
    }
    lines = split_summary(gathered, left, []).lines()
    assert lines == [
        "tile rows gathers tensors for op0 (the model, a, b, 2 more); op1 (the model, a, b, 2 more); "
        "op2 (the model, a, b, 2 more); 2 more",
        "tp gathers tensors for gather (x)",
        "tp keeps 43 parameters whole: blocks.0.norm.weight, blocks.1.norm.weight, blocks.2.norm.weight, 37 more (no "
        "matmul is split by it); words.weight (a table of 11 rows); 2 more",
    ]
    assert split_summary({"rows": {}}, {}, ["a"]).lines() == []


@pytest.mark.parametrize(
    ("bubble", "line"),
    [
        ({}, ""),
        ({"measured": 0.25}, "bubble: predicted nothing, measured 25.0%"),
        (
            {"predicted": 0.2, "measured": 0.25, "order": 0.21},
            "bubble: predicted 20.0%, measured 25.0%; 21.0% if messages took no time",
        ),
    ],
)
def test_bubble_line(bubble: dict[str, float], line: str) -> None:
    assert SplitSummary(bubble=bubble).bubble_line() == line
