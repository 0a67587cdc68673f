"""The benchmark of repeatability (benchmarks/repeats.py) on made-up turns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import repeats

    return repeats


def test_periodic_slowdown_averages_out_in_long_windows(repeats: Any) -> None:
    """Two slow turns, two fast ones: windows of four average them out; jobs slow down half as much as the probe."""
    slow = [math.log(1.21) if i % 4 < 2 else 0.0 for i in range(48)]
    turns = [repeats.Turn(x, (x / 2, 1 + x / 2)) for x in slow]
    assert repeats.mean_difference(turns, 2) == pytest.approx(
        (0.1 + 0.1 / 1.1) / 4, rel=0.05
    )  # half of the positions span a change
    assert repeats.mean_difference(turns, 4) == pytest.approx(0.0, abs=1e-12)
    assert repeats.slope(turns, 1) == pytest.approx(0.5) and abs(repeats.slope(turns, 4)) < 1e-9
    lines = repeats.table(turns, 2.0)
    assert lines[2].startswith("| 2 s | ") and lines[2].endswith("| +0.50 |") and len(lines) == 2 + 5


def test_steady_machine_with_few_turns(repeats: Any) -> None:
    turns = [repeats.Turn(0.0, (1.0,))] * 5
    assert repeats.table(turns, 1.0)[2:] == ["| 1 s | 0.0% | +0.00 |"]


def test_the_page_has_its_marks(repeats: Any) -> None:
    text = repeats.PAGE.read_text(encoding="utf-8")
    assert text.index("<!-- repeats -->") < text.index("<!-- /repeats -->")
