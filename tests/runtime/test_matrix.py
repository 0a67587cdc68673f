"""The matrix that `make parity` runs: complete, every cell with its reason, and able to fail."""

from __future__ import annotations

import math
from collections.abc import Callable

import cells
import matrix
import pytest
import small_jobs
from cells import Cell
from world import World

from drumline.plans import Plan
from drumline.plans.combinations import TESTED_VALUES, refusal

Worlds = Callable[[int], World]


@pytest.mark.parametrize("ranks", cells.RANKS)
def test_every_cell_runs_or_has_a_reason(ranks: int) -> None:
    """A cell that is the same as another names one that runs, and is in the matrix."""
    names = {str(plan) for _, plan in cells.plans(ranks) if isinstance(plan, Plan)}
    run = 0
    for _, plan in cells.plans(ranks):
        if not isinstance(plan, Plan) or refusal(plan):
            assert cells.refused(plan)
            continue
        assert not cells.refused(plan)
        for computed in cells.types_of(plan):
            fate = cells.fate(Cell("mlp", str(plan), computed))
            run += fate is None
            if fate is not None:
                assert fate.words
                assert fate.kind in ("same", "not here", "not run")
            if fate is not None and fate.kind == "same":
                other, _ = cells.same_as(plan, computed)
                assert str(other) in names
                again = cells.fate(Cell("mlp", str(other), computed))
                assert again is None or again.kind == "not run"
    assert run > 80


def test_every_choice_is_covered() -> None:
    """Every value that the planner may choose, and every two of them, at some number of ranks."""
    met = {tuple(sorted(table.items())) for table, _ in cells.plans(4)}
    data = {key: values for key, values in TESTED_VALUES.items() if key not in cells.ELSEWHERE}
    singles = [(key, value) for key, values in data.items() for value in values if value != cells._DEFAULTS[key]]
    assert {((key, value),) for key, value in singles} <= met
    pairs = {tuple(sorted([a, b])) for a in singles for b in singles if a[0] < b[0]}
    assert pairs <= met


def test_judged_parts() -> None:
    cell = Cell("mlp", "dp=2", "float64")
    assert matrix.judge(cell, {"losses": 1e-12, "gradients": 2e-11}, 1.0, {}) == matrix.Result("passed", 2e-11)
    for wrong in (1e-9, math.inf, math.nan):
        failed = matrix.judge(cell, {"losses": 0.0, "gradients": wrong}, 0.0, {"gradients": 1.0})
        assert failed.kind == "FAILED"
        assert failed.words.startswith("gradients off by")
    compressed = Cell("mlp", "dp=2,compress=fp16", "float32")
    assert matrix.judge(compressed, {"losses": 0.0}, 1e-3, {}).kind == "passed"
    assert matrix.judge(compressed, {"losses": 0.0}, 1e-1, {}).words == "losses off by 1.0e-01, at most 0.01"


def test_half_precision_is_judged_by_the_rounding_of_one_device() -> None:
    """Twice as far from one device as that is from float64, and never half of a gradient."""
    cell = Cell("mlp", "dp=2,precision=bf16", "bfloat16")

    def kind(gradients: float, rounding: float, losses: float = 0.0) -> str:
        return matrix.judge(
            cell, {"losses": losses, "gradients": gradients}, 0.0, {"losses": 0.0, "gradients": rounding}
        ).kind

    assert kind(0.049, 0.0) == "passed" and kind(0.051, 0.0) == "FAILED"
    assert kind(0.07, 0.036) == "passed" and kind(0.07, 0.034) == "FAILED"
    assert kind(0.51, 10.0) == "FAILED" and kind(0.06, math.inf) == kind(0.06, math.nan) == "FAILED"
    assert kind(0.0, 0.2, losses=0.06) == "FAILED"  # what the gradients lose is no excuse for the loss
    assert kind(math.nan, 0.2) == "FAILED"


def test_a_passing_and_a_failing_cell(world: Worlds) -> None:
    for computed in ("float64", "float32"):
        result = matrix.run_one(world(2), Cell("mlp", "dp=2,zero=1", computed), 4)
        assert (result.kind, result.error < 1e-5) == ("passed", True)
    result = matrix.run_one(world(2), Cell("mlp", "dp=3", "float64"), 4)
    assert result.kind == "FAILED"
    assert result.words.startswith("PlanError: the plan dp=3 is for 3 ranks, but 2 were started")


def test_the_printed_table_has_reasons() -> None:
    rows = [
        r
        for r in matrix.rows_of(["mlp", "unet"], 2)
        if r.plan in ("dp", "chunk=3", "offload=optimizer", "zero=1,static=true")
    ]
    results = {}
    for cell in (c for row in rows for c in row.cells):
        fate = cells.fate(cell)
        results[cell] = matrix.Result(fate.kind, words=fate.words) if fate else matrix.Result("passed", 3e-15)
    text = "\n".join(matrix.draw(rows, ["mlp", "unet"], 2, results))
    assert "3e-15 3e-15" in text
    assert "zero=1,static=true  refused: a static graph is an option of DDP" in text
    assert "offload=optimizer   same: dp=2: a CPU's memory is the host's: nothing moves" in text
    assert "unet float64 not here: it has no layer that is cut" in text
    assert (
        matrix.summary(results, 4, 60.0)[0]
        == "16 cells: 6 passed, 0 FAILED, 4 same, 4 refused, 2 not here, 0 not run; 1 minutes"
    )


def test_missing_libraries_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cells.fate(Cell("bert", "dp=2", "float64")) == cells.Fate(
        "not here", "transformers is not installed: pip install drumline[hf]"
    )
    assert cells.fate(Cell("mlp", "dp=2", "float64")) is None
    assert set(small_jobs.HF) == {"bert", "llama", "t5", "keys"}
