"""`measure` warns about a busy host."""

from __future__ import annotations

import psutil
import pytest

from drumline.loop.measure import load_of_others


@pytest.mark.parametrize(("percent", "note"), [(5.0, ""), (60.0, "other programs use 2.4 of 4 cores")])
def test_load_of_other_programs_is_reported(percent: float, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    assert load_of_others().startswith(note) and bool(load_of_others()) == bool(note)
