"""Pipeline schedules against the table of the Zero Bubble paper, where it is next to this checkout."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from drumline.core.errors import InputError
from drumline.validation.schedule_ratios import ScheduleRatio, ratios_table, schedule_ratios

DATA = Path(__file__).parents[3] / "shared" / "data" / "published_runs.csv"
PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
published = pytest.mark.skipif(not DATA.is_file(), reason="the published tables are not next to this checkout")
TIE = 0.02
"""Measured ratios that are closer have no order: the paper prints two or three digits."""


@pytest.fixture(scope="module")
def ratios() -> list[ScheduleRatio]:
    return schedule_ratios(DATA)


@published
def test_ratios_are_within_five_percent(ratios: list[ScheduleRatio]) -> None:
    assert len(ratios) == 36
    assert max(abs(one.error) for one in ratios) < 0.05


@published
def test_schedules_have_the_measured_order(ratios: list[ScheduleRatio]) -> None:
    compared = 0
    for _, group in itertools.groupby(ratios, key=lambda r: (r.model, r.micros)):
        there = [(r.measured, r.simulated) for r in group] + [(1.0, 1.0)]
        for (measured, simulated), (other_measured, other_simulated) in itertools.combinations(there, 2):
            if abs(measured / other_measured - 1) > TIE:
                compared += 1
                assert (measured > other_measured) == (simulated > other_simulated)
    assert compared >= 60


@published
def test_the_page_shows_them(ratios: list[ScheduleRatio]) -> None:
    assert ratios_table(ratios) in PAGE.read_text()


@published
def test_without_the_two_assumptions_interleaved_is_too_fast() -> None:
    """The check can fail: messages that nobody waits for make 1F1B-I up to 8% too fast between nodes."""
    free = schedule_ratios(DATA, waits=False)
    beyond = [r for r in free if abs(r.error) >= 0.05]
    assert {r.schedule for r in beyond} == {"1F1B-I"} and {r.model for r in beyond} == {"14.6B", "28.3B"}
    assert max(r.error for r in beyond) < 0.09


def test_a_table_without_the_paper_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("source,source_row\nsomebody else,1\n")
    with pytest.raises(InputError, match="no runs of Zero Bubble"):
        schedule_ratios(path)
