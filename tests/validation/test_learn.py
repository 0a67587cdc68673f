"""Profiles from runs: a fit finds what was put in, stays at its prior where nothing speaks, and a bad row does not move it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_rows import table

from drumline.costs.fitted.constants import NAMES, PRIOR
from drumline.validation.fit_constants import learn, leave_one_out, predict_with, profiles_of
from drumline.validation.predict import constants_of, predict
from drumline.validation.read_runs import read_runs
from drumline.validation.robust_fit import Problem, fit, slopes_at
from drumline.validation.run_columns import Runs, arrays


def test_a_fit_finds_what_was_put_in() -> None:
    x = np.linspace(1, 2, 40)
    measured = 3.0 * x**0.7
    measured[5] *= 4  # one bad row
    problem = Problem(
        lambda p: np.log(np.exp(p[0]) * x ** np.exp(p[1]) / measured),
        np.log([2.0, 1.0]),
        np.array([5.0, 5.0]),
        np.ones(40),
    )
    assert np.exp(fit(problem, problem.centre)) == pytest.approx([3.0, 0.7], rel=0.02)
    slopes = slopes_at(problem.errors, problem.centre, problem.errors(problem.centre))
    assert np.exp(fit(problem, problem.centre, slopes=slopes)) == pytest.approx([3.0, 0.7], rel=0.1)


def test_what_no_row_speaks_of_stays_at_its_prior() -> None:
    problem = Problem(lambda p: p[0] - 1.0 + np.zeros(5), np.zeros(2), np.array([1.0, 1.0]), np.ones(5))
    found = fit(problem, problem.centre)
    assert found[0] > 0.9 and found[1] == 0


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Three sources on two chips; times by a machine that is a tenth slower than its prior."""
    rows = [
        {"source": source, "gpu": gpu, "micro_batch": str(mb), "tp": str(tp), "dp": str(8 // tp)}
        for source, gpu in (("a", "A100-80GB-SXM"), ("b", "A100-80GB-SXM"), ("c", "H100-80GB-SXM"))
        for mb, tp in ((1, 1), (2, 1), (4, 2), (8, 8))
    ]
    columns = arrays(read_runs(table(tmp_path, *rows))[0])
    start = learn(columns.take(np.array([], dtype=np.intp)))
    columns.seconds[:] = 1.1 * predict_with(columns, start)[0]
    return columns


def test_profiles_predict_as_the_fit_does(runs: Runs) -> None:
    fitted = learn(runs)
    profiles = profiles_of(runs, fitted, "a test", 0.1)
    assert predict_with(runs, fitted)[0] == pytest.approx(runs.seconds, rel=0.03)
    assert predict(runs, profiles)[0] == pytest.approx(predict_with(runs, fitted)[0], rel=1e-3)
    assert profiles.device["H100"].rows == 4 and profiles.device["H200"].constants == profiles.device["H100"].constants
    assert profiles.device["MI300X"].rows == 0 and "not seen" in profiles.device["MI300X"].origin
    assert profiles.shared["misaligned"] == pytest.approx(PRIOR["misaligned"], rel=1e-3)
    assert np.all(np.asarray(constants_of(runs, profiles).products) > 0) and len(fitted.time) > len(NAMES)


def test_a_source_does_not_see_itself(runs: Runs) -> None:
    """One source that lies by a factor of two is predicted as the others say, and the others are not moved by it."""
    truth = runs.seconds.copy()
    runs.seconds[:4] *= 2
    seconds, _ = leave_one_out(runs)
    assert seconds[:4] == pytest.approx(truth[:4], rel=0.06)
