"""The seconds of a run, over restarts of its ranks and over resumed runs."""

from __future__ import annotations

import pytest

from drumline.loop import training_events
from drumline.loop.training_events import _RunClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [100.0]
    monkeypatch.setattr(training_events.time, "monotonic", lambda: moment[0])
    return moment


def test_restarts_count_what_was_lost(now: list[float]) -> None:
    clock = _RunClock(0.0)
    clock.new_attempt()
    now[0] = 102.0
    assert clock.at(0.5) == 0.5  # the first step began at 101.5
    now[0] = 103.0
    assert clock.at(1.5) == 1.5
    clock.new_attempt()
    now[0] = 110.0
    assert clock.at(0.5) == 8.5  # its first step began at 109.5
    now[0] = 999.0
    assert clock.at(1.0) == 9.0  # the report was late, the step was not


def test_resumed_runs_continue(now: list[float]) -> None:
    clock = _RunClock(40.0)
    now[0] = 101.0
    assert clock.at(0.25) == 40.25


def test_reports_without_a_time(now: list[float]) -> None:
    clock = _RunClock(0.0)
    assert clock.at(None) == 0.0
    now[0] = 101.5
    assert clock.at(None) == 1.5
