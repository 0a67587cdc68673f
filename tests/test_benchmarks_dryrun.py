"""The table of the memory benchmark (benchmarks/dryrun_gpu.py) from made-up rows, and its place in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def dryrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import dryrun_gpu

    return dryrun_gpu


def test_the_table_counts_equal_states_and_errors(dryrun: Any) -> None:
    mib = 2**20
    exact = dryrun.Row("gpt", "dp=1", 164 * mib, 100 * mib, 64 * mib, (1, 2, 3), (1, 2, 3))
    off = dryrun.Row("cnn", "dp=1,micro=2", 100 * mib, 98 * mib, 0, (1, 2, 3), (1, 2, 4))
    lines = dryrun.table([exact, off])
    assert lines[2:4] == [
        "| gpt | `dp=1` | 164 MiB | 64 MiB | 100 MiB | +0.0% |",
        "| cnn | `dp=1,micro=2` | 100 MiB | 0 MiB | 98 MiB | -2.0% |",
    ]
    assert lines[-1].startswith("States agree to the byte in 1 of 2 plans; ")
    assert lines[-1].endswith("1.0% on average, 2.0% at worst.")


def test_the_page_has_a_row_for_every_plan(dryrun: Any) -> None:
    block = dryrun.PAGE.read_text().partition("<!-- dry run -->")[2].partition("<!-- /dry run -->")[0]
    rows = [line.split(" | ")[:2] for line in block.splitlines() if line.startswith("| ") and "`" in line]
    assert rows == [[f"| {job}", f"`{plan}`"] for job, plans in dryrun.PLANS.items() for plan in plans]
