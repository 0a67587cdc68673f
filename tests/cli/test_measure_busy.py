"""`measure` on a host that is in use says so."""

from __future__ import annotations

import psutil
import pytest

from drumline.cli.measure import _others


@pytest.mark.parametrize(("percent", "said"), [(5.0, ""), (60.0, "note: other programs use 2.4 of 4 cores")])
def test_other_programs_are_told_of(percent: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    assert _others().startswith(said) and bool(_others()) == bool(said)
