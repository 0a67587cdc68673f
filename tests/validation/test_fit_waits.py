"""Waits of hosts that stand still for their messages: counted, fitted, and predicted without the model of the row."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from run_rows import table

from drumline.costs.fitted import load_constants
from drumline.costs.fitted.engine_layouts import engine_layouts
from drumline.costs.fitted.host_waits import NEARLY_FULL, WaitConstants, stage_messages
from drumline.costs.plan_columns import PlanColumns
from drumline.plans import Plan
from drumline.schedules.pipeline import pipeline_order
from drumline.validation import validate
from drumline.validation.fit_waits import fit_waits, leave_models_out
from drumline.validation.read_runs import read_runs
from drumline.validation.run_columns import (
    RunColumns,
    constants_of,
    device_fraction,
    predict,
    predict_times,
    run_columns,
)

FITTED = load_constants()
TRUE = WaitConstants(0.2, 5.0, 2e-3, 3e-4, 6e-5, 0.3, 1e-3)
"""Waits of the runs below, other than those that ship and than the values from which a fit starts."""


@pytest.fixture
def runs(tmp_path: Path) -> RunColumns:
    """Layouts of two models on 1 to 64 nodes of a software whose hosts wait."""
    rows = [
        {
            "layers": str(layers),
            "hidden": str(hidden),
            "ffn": str(4 * hidden),
            "params_b": "",
            "n_gpus": str(n),
            "tp": str(tp),
            "pp": str(pp),
            "dp": str(n // tp // pp),
            "global_batch": "1024",
            "micro_batch": "1",
            "zero_fsdp": str(zero),
        }
        for (layers, hidden), n, tp, pp, zero in itertools.product(
            ((16, 2048), (32, 3072)), (8, 64, 256, 512), (1, 4, 16), (1, 2, 4), (0, 1)
        )
        if n % (tp * pp) == 0
    ]
    columns = run_columns(read_runs(table(tmp_path, *rows))[0])
    assert columns.layouts.host_waits.all()
    columns.seconds[:] = predict(columns, replace(FITTED, waits=TRUE))[0]
    return columns


def close(waits: WaitConstants | None) -> None:
    assert waits is not None
    for field in fields(WaitConstants):
        assert getattr(waits, field.name) == pytest.approx(getattr(TRUE, field.name), rel=0.05), field.name


def test_a_fit_recovers_the_waits(runs: RunColumns) -> None:
    close(fit_waits(runs, replace(FITTED, waits=None)))


def test_a_model_is_predicted_by_the_others_alone(runs: RunColumns) -> None:
    """Times of one model that are wrong by a factor of ten do not move its own prediction, only that of the other."""
    truth, own = runs.seconds.copy(), runs.models.hidden == 3072
    runs.seconds[own] *= 10
    seconds = leave_models_out(runs, FITTED)
    assert seconds[own] == pytest.approx(truth[own], rel=0.05)
    assert np.abs(np.log(seconds[~own] / truth[~own])).max() > 0.5


def test_a_number_of_ranks_is_predicted_by_the_others(runs: RunColumns) -> None:
    """With sizes left out as well, rows of as many ranks do not move the prediction, whatever their model."""
    own = (runs.models.hidden == 3072) & (runs.layouts.ranks == 256)
    before = leave_models_out(runs, FITTED, sizes_too=True)[own]
    runs.seconds[runs.layouts.ranks == 256] *= 10
    assert leave_models_out(runs, FITTED, sizes_too=True)[own] == pytest.approx(before)


def test_hosts_that_run_ahead_have_no_waits(runs: RunColumns, tmp_path: Path) -> None:
    constants = constants_of(runs, FITTED)
    waiting, ahead = predict_times(runs, constants, TRUE).total, predict_times(runs, constants).total
    far = runs.layouts.ranks == 512
    assert np.all(waiting >= ahead) and np.all(
        waiting[far & (runs.layouts.pp > 1)] > 2 * ahead[far & (runs.layouts.pp > 1)]
    )
    for change in ({"zero_fsdp": "FSDP"}, {"precision": "bf16, torch.compile"}, {"year": "2021", "precision": "fp16"}):
        other = run_columns(read_runs(table(tmp_path, change))[0])
        assert not other.layouts.host_waits.any() and fit_waits(other, FITTED) is None
    plans = PlanColumns.from_plans([Plan.parse("dp=64,tp=2,pp=4,zero=1,micro=8,schedule=1f1b,precision=bf16")])
    assert not engine_layouts(plans, 512).host_waits.any()


def test_every_message_stalls_on_a_device_that_is_nearly_full(tmp_path: Path) -> None:
    row = {"tp": "1", "pp": "2", "dp": "4", "global_batch": "64"}
    sizes = ({**row, "micro_batch": str(n), "hidden": "4096", "heads": "32"} for n in (1, 4, 16))
    columns = run_columns(read_runs(table(tmp_path, *sizes))[0])
    constants = constants_of(columns, FITTED)
    full = device_fraction(columns, constants)
    stalls = predict_times(columns, constants, TRUE).pp - predict_times(columns, constants).pp
    assert full[0] < NEARLY_FULL < full[-1]
    for at, stalled in zip(full, stalls / (TRUE.stage_stall * stage_messages(columns.layouts)), strict=True):
        assert stalled == pytest.approx(1.0) if at > NEARLY_FULL else stalled < 0.01


@pytest.mark.parametrize(("stages", "micros"), [(2, 1), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_messages_of_the_busiest_rank(stages: int, micros: int) -> None:
    """As many as its forwards and backwards receive and send, and those before the first and after the last of them."""
    lanes = pipeline_order("1f1b", stages, micros).lanes
    neighbours = [(s > 0) + (s < stages - 1) for s in range(stages)]
    own = max(len(lane) * n for lane, n in zip(lanes, neighbours, strict=True))
    plan = Plan.parse(f"dp=1,pp={stages},micro={micros},schedule=1f1b,precision=bf16")
    layouts = engine_layouts(PlanColumns.from_plans([plan]), micros)
    assert stage_messages(layouts) == [own + (2 * (stages - 2) if stages > 2 else 0)]


DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not DATA.is_dir(), reason="the published tables are not next to this checkout")
def test_the_sweep_with_each_model_left_out() -> None:
    result = validate(DATA / "published_runs_bulk.csv", lomo=True)
    waiting = {run.source for run in result.runs if run.software.host_waits}
    groups = [g for g in result.ranked("model") if g.source in waiting]
    assert len(groups) == 14
    assert np.mean([g.spearman for g in groups]) >= 0.8 and np.mean([g.regret for g in groups]) <= 0.1
    before = [g for g in result.ranked() if g.source not in waiting]
    after = [g for g in result.ranked("model") if g.source not in waiting]
    assert before == after
