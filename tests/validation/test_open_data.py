"""Errors on the published runs that are open to all: bounds that a change may not exceed unnoticed."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from drumline.costs.fitted import load_constants
from drumline.planner.objectives import TIE
from drumline.validation import RunsValidation, validate
from drumline.validation.errors import ErrorScore, job_of, overall, relative
from drumline.validation.fit_constants import leave_one_out
from drumline.validation.read_runs import read_runs
from drumline.validation.result import fit_file
from drumline.validation.run_columns import run_columns

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the published tables are not next to this checkout")


@pytest.fixture(scope="module")
def result() -> RunsValidation:
    return validate(DATA / "published_runs.csv")


def errors_of(result: RunsValidation, rows: list[int]) -> ErrorScore:
    """Errors of some runs."""
    measured = np.array([np.nan if (s := result.runs[i].seconds) is None else s for i in rows])
    errors = overall(relative(result.seconds[rows], measured))
    assert errors is not None
    return errors


def test_every_row_is_read_or_skipped_with_a_reason(result: RunsValidation) -> None:
    with (DATA / "published_runs.csv").open(newline="") as f:
        records = sum(1 for _ in csv.reader(f)) - 1
    assert len(result.runs) >= 725 and len(result.runs) + len(result.skipped) == records >= 841
    assert all(s.reason for s in result.skipped)


def test_errors_with_the_shipped_constants(result: RunsValidation) -> None:
    time, memory = result.in_sample.time, result.in_sample.memory
    assert time is not None and time.rows >= 717 and memory is not None
    assert time.mean <= 0.07 and time.median <= 0.045 and time.p90 <= 0.15 and abs(time.bias) <= 0.02
    assert memory.mean <= 0.06 and memory.median <= 0.03


def test_errors_on_mixtures_of_experts(result: RunsValidation) -> None:
    time = errors_of(result, [i for i, run in enumerate(result.runs) if run.mixture])
    assert time.rows >= 22 and time.mean <= 0.13


def test_layouts_of_sweeps_that_no_fit_has_seen() -> None:
    constants = dataclasses.replace(load_constants(), waits=None, waits_origin="")
    ranked = validate(DATA / "published_runs_bulk.csv", constants=constants).ranked()
    assert len(ranked) >= 100
    assert np.mean([g.spearman for g in ranked]) >= 0.88 and np.mean([g.regret for g in ranked]) <= 0.10


def test_ranking_of_layouts(result: RunsValidation) -> None:
    ranked = result.ranked()
    assert len(ranked) >= 8
    assert sum(g.spearman for g in ranked) / len(ranked) > 0.8
    assert sum(g.regret <= 0.02 for g in ranked) >= len(ranked) - 1


def test_smaller_differences_than_a_tie_say_little_and_larger_ones_much(result: RunsValidation) -> None:
    """Pairs of runs that differ in their layout alone: how often the one predicted to be faster was faster."""
    jobs: dict[object, list[int]] = {}
    for i, run in enumerate(result.runs):
        if run.seconds is not None:
            jobs.setdefault(job_of(run), []).append(i)
    below, above = [], []
    for a, b in (pair for rows in jobs.values() for pair in itertools.combinations(rows, 2)):
        predicted = np.log(result.seconds[a] / result.seconds[b])
        measured = np.log((result.runs[a].seconds or 0) / (result.runs[b].seconds or 0))
        if abs(predicted) < 2.5 * TIE and predicted:
            (below if abs(predicted) < TIE else above).append(predicted * measured > 0)
    assert len(below) >= 200 and len(above) >= 300
    assert 0.45 < sum(below) / len(below) < 0.62 and sum(above) / len(above) > 0.68


@pytest.mark.slow
def test_errors_with_the_source_left_out() -> None:
    result = validate(DATA / "published_runs.csv", loso=True)
    loso = result.loso
    assert sum(g.spearman >= 0.9 for g in result.ranked("source")) >= 5
    assert loso is not None and loso.time is not None and loso.memory is not None
    assert loso.time.median <= 0.05 and loso.time.mean <= 0.08 and loso.time.p90 <= 0.16 and abs(loso.time.bias) <= 0.02
    assert loso.memory.mean <= 0.06


@pytest.mark.slow
def test_converged_fits_without_a_source_are_a_little_worse() -> None:
    runs, _ = read_runs(DATA / "published_runs.csv")
    columns = run_columns(runs)
    seconds, sizes = leave_one_out(columns, converge=True)
    errors, memory = (
        overall(relative(predicted, measured))
        for predicted, measured in ((seconds, columns.seconds), (sizes, columns.memory))
    )
    assert errors is not None and errors.mean < 0.08 and errors.p90 < 0.16
    assert memory is not None and memory.mean < 0.06
    mixtures = np.array([r.mixture is not None for r in runs])
    few = overall(relative(seconds[mixtures], columns.seconds[mixtures]))
    assert few is not None and few.mean < 0.15


@pytest.mark.slow
def test_the_shipped_constants_are_those_of_the_fit() -> None:
    shipped, fitted = load_constants(), fit_file(DATA / "published_runs.csv")
    assert fitted.origin == shipped.origin and fitted.device.keys() == shipped.device.keys()
    assert fitted.shared == pytest.approx(shipped.shared, rel=0.02)
    assert fitted.error == pytest.approx(shipped.error, rel=0.02)
    for name, device in fitted.device.items():
        assert device.constants == pytest.approx(shipped.device[name].constants, rel=0.02), name


def test_every_row_of_the_bulk_is_read() -> None:
    result = validate(DATA / "published_runs_bulk.csv")
    assert len(result.runs) == 2514 and not result.skipped
    single = next(s for name, s in result.in_sample.times.items() if "ground_truth_single" in name)
    # one node, small models: none of these rows is in the fit, but some priors were set with them in view
    assert single.median <= 0.12
