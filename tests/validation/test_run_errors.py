"""Error statistics, rank correlation, regret, and the scatter plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_rows import table

from drumline.validation.errors import by_source, layout_groups, overall, score, spearman
from drumline.validation.read_runs import read_runs
from drumline.validation.scatter_plot import scatter


def test_error_score() -> None:
    errors = score(np.array([0.1, -0.3, 0.2]))
    assert errors is not None and errors.rows == 3 and errors.worst == 0.3
    assert (errors.mean, errors.median, errors.bias) == pytest.approx((0.2, 0.2, 0.0)) and errors.p90 == pytest.approx(
        0.28
    )
    assert score(np.array([])) is None


def test_unmeasured_rows_do_not_count() -> None:
    errors = np.array([0.1, np.nan, 0.3])
    assert overall(errors).rows == 2  # type: ignore[union-attr]
    assert {k: v.rows for k, v in by_source(errors, ["a", "a", "b"]).items()} == {"a": 1, "b": 1}


def test_rank_correlation() -> None:
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(a, 10 * a) == pytest.approx(1) and spearman(a, -a) == pytest.approx(-1)
    assert spearman(a, np.ones(4)) == 0
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(np.sqrt(3) / 2)


def test_groups_differ_in_the_layout_alone(tmp_path: Path) -> None:
    layouts = [{"tp": "1", "dp": "8"}, {"tp": "2", "dp": "4"}, {"tp": "8", "dp": "1"}]
    rows = [{**x, "iteration_time_s": t} for x, t in zip(layouts, ("2.0", "2.2", "3.0"), strict=True)]
    others = ({"global_batch": "128", "iteration_time_s": "4"}, {"note": "after a fix of its links (do not mix)"})
    runs, _ = read_runs(table(tmp_path, *rows, *others))
    right, wrong = (layout_groups(runs, np.array(guess))[0] for guess in ([1.0, 2, 3, 4, 5], [2.0, 1, 3, 4, 5]))
    assert (right.rows, right.spearman, right.regret) == (3, pytest.approx(1), 0) and right.spread == pytest.approx(0.5)
    assert wrong.spearman == pytest.approx(0.5) and wrong.regret == pytest.approx(0.1)


def test_the_plot_is_a_safe_svg() -> None:
    drawn = scatter([("<script>", 0.5, 0.6), ("b", 80.0, 70.0)], "Title")
    assert drawn.startswith("<svg") and "<script>" not in drawn and drawn.count("<circle") == 4 and 'class="i"' in drawn
