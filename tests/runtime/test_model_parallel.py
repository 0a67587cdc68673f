"""Parity of plans that split the model: a cover of the matrix every day, more of it slowly, all of it by `make parity`."""

from __future__ import annotations

from collections.abc import Callable

import cells
import matrix
import parity
import pytest
import small_jobs
import split_cells
from cells import Cell
from world import World

from drumline.plans import Plan
from drumline.plans.combinations import TESTED_VALUES, UNRESTRICTED_KEYS

Worlds = Callable[[int], World]
STEPS = 3
"""Two full batches and a ragged one."""


def title(cell: Cell) -> str:
    return f"{cell.job}:{cell.plan.removeprefix('dp=1,')}:{cell.computed}"


def check_cell(world: Worlds, cell: Cell, steps: int = STEPS) -> None:
    if why := small_jobs.missing(cell.job):
        pytest.skip(why)
    result = matrix.run_one(world(Plan.parse(cell.plan).ranks), cell, steps)
    assert result.kind == "passed", result


@pytest.mark.parametrize("cell", split_cells.quick(), ids=title)
def test_cover(world: Worlds, cell: Cell) -> None:
    check_cell(world, cell)


def test_refused_cells_name_their_reason(world: Worlds) -> None:
    """The engine refuses the cells that the matrix lists as refused, with the same message."""
    for job, plan in [("gpt", "tp=4"), ("mlp", "tile=2x2"), ("groups", "cp=4"), ("huge", "dp=2,tile=1x2")]:
        result = matrix.run_one(world(4), Cell(job, plan, "float64"), 1)
        assert result.kind == "refused", result


def test_an_unexpected_refusal_is_a_failure(world: Worlds) -> None:
    result = matrix.run_one(world(2), Cell("lstm", "tp=2", "float64"), 1)
    assert (result.kind, result.words[:16]) == ("FAILED", "PlanError: tp=2:")


@pytest.mark.parametrize("ranks", split_cells.RANKS)
def test_every_cell_runs_or_has_a_reason(ranks: int) -> None:
    run = 0
    for _, plan in split_cells.plans(ranks):
        if not isinstance(plan, Plan) or cells.refused(plan):
            assert cells.refused(plan)
            continue
        assert plan.ranks == ranks and plan.splits_model
        for cell in [Cell(j, str(plan), t) for j in ("gpt", "groups", "huge") for t in split_cells.types_of(plan)]:
            fate = split_cells.fate(cell)
            run += fate is None
            assert fate is None or (fate.words and fate.kind in ("same", "refused"))
    assert run > 60
    names = [str(plan) for _, plan in split_cells.plans(ranks) if isinstance(plan, Plan)]
    assert len(names) == len(set(names))  # or a cell would be run twice


def test_every_axis_and_choice_is_covered() -> None:
    tables = [{k: str(v) for k, v in table.items()} for n in split_cells.RANKS for table, _ in split_cells.plans(n)]
    assert {key for table in tables for key in table} >= parity.SPLITS - {"split", "halo", "ep"}
    assert set(TESTED_VALUES) | UNRESTRICTED_KEYS >= parity.SPLITS
    assert {table.get("schedule", "1f1b") for table in tables if "pp" in table} == set(TESTED_VALUES["schedule"])
    axes = {frozenset(table) & {"pp", "dp", "tile", "cp", "tp"} for table in tables}
    assert {
        frozenset(pair) for pair in [("pp", "dp"), ("pp", "tp"), ("pp", "cp"), ("pp", "tile"), ("dp", "tp")]
    } <= axes
    assert {frozenset({"pp", "dp", "tp"}), frozenset({"dp", "tile", "tp"}), frozenset({"dp", "cp", "tp"})} <= axes


def test_the_cover_has_every_pair() -> None:
    result = split_cells.quick()
    tried = [c for n in (2, 4) for c in split_cells.cells_of(n, split_cells.QUICK)]
    tried = [c for c in tried if not split_cells.unfit(c.job, Plan.parse(c.plan))]
    assert set().union(*map(split_cells.wanted, result)) == set().union(*map(split_cells.wanted, tried))
    assert len(result) < 40


@pytest.mark.slow
@pytest.mark.parametrize("job", small_jobs.SPLIT_JOBS)
@pytest.mark.parametrize(
    "plan",
    [
        "tp=2",
        "cp=2",
        "tile=2x1",
        "tile=1x2",
        "pp=2,micro=3",
        "pp=2,micro=3,schedule=zero-bubble",
        "pp=2,micro=3,virtual=2,schedule=interleaved",
        "tp=2,pp=2,micro=3",
        "dp=2,tp=2,zero=1",
        "tile=2x2",
    ],
)
def test_every_job(world: Worlds, job: str, plan: str) -> None:
    """Ten steps, as the claim says."""
    if split_cells.unfit(job, Plan.parse(plan)):
        pytest.skip("refused")
    check_cell(world, Cell(job, plan, "float64"), 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "dp=2,tp=2,pp=2,micro=3"),
        ("gpt", "dp=2,tp=2,pp=2,micro=3,zero=1,schedule=zero-bubble"),
        ("gpt", "dp=2,tp=2,cp=2"),
        ("masked", "pp=4,dp=2,micro=3"),
        ("huge", "dp=2,tp=2,pp=2,micro=3"),
        ("resnet", "dp=2,tile=2x2"),
        ("groups", "dp=2,tp=2,tile=2x1"),
        ("groups", "pp=2,micro=3,tile=2x2"),
    ],
)
def test_eight_ranks(world: Worlds, job: str, plan: str) -> None:
    check_cell(world, Cell(job, plan, "float64"))
    world(8).stop()  # eight processes for one test; the others need their memory


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "tp=2,backend=shm"),
        ("gpt", "cp=2,backend=shm"),
        ("groups", "tile=2x1,backend=shm"),
        ("mlp", "pp=2,micro=3,backend=shm"),
        ("masked", "pp=2,micro=3,schedule=zero-bubble,backend=shm"),
    ],
)
def test_on_shared_memory(world: Callable[..., World], job: str, plan: str) -> None:
    result = matrix.run_one(world(2, "shm"), Cell(job, plan, "float64"), STEPS)
    assert result.kind == "passed", result


@pytest.mark.parametrize(
    ("job", "plan"), [("gpt", "tp=2"), ("mlp", "pp=2,micro=3"), ("groups", "tile=2x1"), ("masked", "cp=2")]
)
def test_half_precision(world: Worlds, job: str, plan: str) -> None:
    check_cell(world, Cell(job, f"{plan},precision=fp16", "float16"), 2)
