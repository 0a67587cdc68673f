"""The benchmark of layouts on two hosts: its list of layouts, the placement of mesh axes, and the text of its verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_axes_inside_and_across_hosts() -> None:
    from layout_tasks import places

    assert places("dp=1,tp=2,pp=2", False) == {"tp": "inside", "pp": "across"}
    assert places("dp=1,tp=2,pp=2", True) == {"tp": "across", "pp": "inside"}
    assert places("dp=2,pp=2", False) == {"dp": "inside", "pp": "across"}
    assert places("dp=1,tp=4", False) == places("dp=1,tp=4", True) == {"tp": "across"}


def test_layouts_include_every_product_of_axes() -> None:
    from layout_tasks import layouts

    axes = {samples: {(p.pp, p.dp, p.cp, p.tp) for p in layouts(samples)} for samples in (2, 4)}
    assert len(axes[4]) == 10  # each of four axes on all ranks, and six pairs
    assert axes[4] - axes[2] == {(1, 4, 1, 1)}  # two samples are not enough for four replicas


def _results(step: float) -> dict[str, Any]:
    plans = {"dp=1,tp=2,pp=2": 1.0, "dp=2,tp=2": step, "dp=1,tp=4": 3.0}
    return {
        "chosen": "dp=1,tp=2,pp=2",
        "candidates": 7,
        "idle": "",
        "links": "",
        "rate": "200mbit",
        "cores": 0.5,
        "predicted": {p: 1.0 + i for i, p in enumerate(plans)},
        "tried": {p: [t] * 3 for p, t in plans.items()},
        "turns": {p: [t] * 5 for p, t in plans.items() if t < 2},
        "apart": {p: [4.0] * 3 for p in plans},
    }


def test_fastest_plan_of_every_product_of_axes() -> None:
    from layouts import fastest

    tried = {"dp=2,tp=2": [3.0], "dp=2,zero=1,tp=2": [2.0], "dp=1,pp=4,micro=2": [1.0]}
    assert fastest({"tried": tried}) == ["dp=1,pp=4,micro=2", "dp=2,zero=1,tp=2"]


@pytest.mark.parametrize(("step", "says"), [(1.2, "right. The next takes 1.20"), (0.8, "wrong. The next takes 0.80")])
def test_verdict_follows_the_measurements(step: float, says: str) -> None:
    from layouts import table_lines

    text = "\n".join(table_lines("wide", _results(step)))
    assert says in text
    assert "tensor parallelism over the wire takes 3.00 of it" in text and "idle" not in text
    assert "| `dp=1,tp=2,pp=2`, ranks in turns | pp | tp |  | 4000 ms |" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_benchmark_runs_on_two_hosts() -> None:
    command = [sys.executable, str(BENCHMARKS / "layouts.py"), "--tasks", "small", "--blocks", "2", "--cores", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    if "not run: " in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr[-2000:]
    for plan in ("dp=1,tp=4", "dp=1,cp=4", "dp=2,tp=2", "dp=4", "dp=4,zero=", "dp=1,pp=4", "dp=1,tp=2,cp=2"):
        assert f"| `{plan}" in done.stdout, done.stdout
