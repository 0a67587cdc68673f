"""Fitting constants: the fit recovers the truth, keeps priors without evidence, and resists bad rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_rows import table

from drumline.costs.fitted.constants import PRIOR, TIME_CONSTANTS
from drumline.validation.fit_constants import fit_constants, leave_one_out, predict_with, to_fitted_constants
from drumline.validation.read_runs import read_runs
from drumline.validation.robust_fit import FitProblem, fit, jacobian_at
from drumline.validation.run_columns import RunColumns, constants_of, predict, run_columns


def test_a_fit_recovers_the_parameters() -> None:
    x = np.linspace(1, 2, 40)
    measured = 3.0 * x**0.7
    measured[5] *= 4  # one bad row
    problem = FitProblem(
        lambda p: np.log(np.exp(p[0]) * x ** np.exp(p[1]) / measured),
        np.log([2.0, 1.0]),
        np.array([5.0, 5.0]),
        np.ones(40),
    )
    assert np.exp(fit(problem, problem.centre)) == pytest.approx([3.0, 0.7], rel=0.02)
    jacobian = jacobian_at(problem.errors, problem.centre, problem.errors(problem.centre))
    assert np.exp(fit(problem, problem.centre, jacobian=jacobian)) == pytest.approx([3.0, 0.7], rel=0.1)


def test_parameters_without_evidence_stay_at_their_prior() -> None:
    problem = FitProblem(lambda p: p[0] - 1.0 + np.zeros(5), np.zeros(2), np.array([1.0, 1.0]), np.ones(5))
    x = fit(problem, problem.centre)
    assert x[0] > 0.9 and x[1] == 0


@pytest.fixture
def runs(tmp_path: Path) -> RunColumns:
    """Three sources on two chips; times of a machine 10% slower than its prior."""
    rows = [
        {"source": source, "gpu": gpu, "micro_batch": str(mb), "tp": str(tp), "dp": str(8 // tp)}
        for source, gpu in (("a", "A100-80GB-SXM"), ("b", "A100-80GB-SXM"), ("c", "H100-80GB-SXM"))
        for mb, tp in ((1, 1), (2, 1), (4, 2), (8, 8))
    ]
    columns = run_columns(read_runs(table(tmp_path, *rows))[0])
    start = fit_constants(columns.take(np.array([], dtype=np.intp)))
    columns.seconds[:] = 1.1 * predict_with(columns, start)[0]
    return columns


def test_the_file_form_predicts_the_same(runs: RunColumns) -> None:
    logs = fit_constants(runs)
    fitted = to_fitted_constants(runs, logs, "a test", 0.1)
    assert predict_with(runs, logs)[0] == pytest.approx(runs.seconds, rel=0.03)
    assert predict(runs, fitted)[0] == pytest.approx(predict_with(runs, logs)[0], rel=1e-3)
    assert fitted.device["H100"].rows == 4 and fitted.device["H200"].constants == fitted.device["H100"].constants
    assert fitted.device["MI300X"].rows == 0 and "no published runs" in fitted.device["MI300X"].origin
    assert fitted.shared["misaligned_head"] == pytest.approx(PRIOR["misaligned_head"], rel=1e-3)
    assert np.all(np.asarray(constants_of(runs, fitted).matmul) > 0) and len(logs.time) > len(TIME_CONSTANTS)


def test_leaving_a_source_out(runs: RunColumns) -> None:
    """A source that is wrong by a factor of two is predicted by the others, and does not move them."""
    truth = runs.seconds.copy()
    runs.seconds[:4] *= 2
    seconds, _ = leave_one_out(runs)
    assert seconds[:4] == pytest.approx(truth[:4], rel=0.06)
