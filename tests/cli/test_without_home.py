"""A home that is read-only, or missing: `plan` and `train` work, the cache is optional."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from test_broken_output import JOB

from drumline.comm.shm import native
from drumline.loop import measure


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc/1/nothing"])
def test_nothing_is_found_in_a_home_that_cannot_be_used(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    for name in ("XDG_CACHE_HOME", "DRUMLINE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    notes: list[str] = []
    measured = object.__new__(type("Measured", (), {"save": lambda self, path: _refuse(path)}))
    monkeypatch.setattr(measure, "measure_local", lambda *_, **__: measured)
    assert measure.this_machine(2, notify=notes.append) is measured
    assert len(notes) == 2 and notes[1].startswith("the measurement is not stored: ")
    folder, persistent = native._cache_folder()
    folder.rmdir()
    assert not persistent


def _refuse(path: Path) -> None:
    from drumline.core.files import write_text

    write_text(path, "x")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "DRUMLINE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RuntimeError):
        Path.home()
    assert not os.path.exists(measure.cached_cluster(2))
    folder, persistent = native._cache_folder()
    folder.rmdir()
    assert not persistent


@pytest.mark.slow
@pytest.mark.timeout(600)  # it measures the machine
def test_train(tmp_path: Path) -> None:
    """The machine is measured, and nothing is stored: one note, no traceback."""
    (tmp_path / "j.py").write_text(JOB)
    env = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "DRUMLINE_CACHE")}
    words = ["train", "j.py", "--plan", "auto", "--steps", "3", "-o", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "drumline", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
        env={**env, "HOME": "/dev/null/home"},
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("the measurement is not stored") == 1
