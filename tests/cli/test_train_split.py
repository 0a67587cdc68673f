"""`drumline train` and `verify` under plans that split the model: their output and files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
JOB = """
import sys
sys.path += {paths!r}
import sleeping_jobs, small_jobs


def job():
    return sleeping_jobs.job((0.01, 0.01), samples=4)


def tokens():
    return small_jobs.make("gpt")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paths = [str(HERE), str(HERE / "runtime" / "pipeline")]
    (tmp_path / "j.py").write_text(JOB.format(paths=paths))
    return tmp_path


def drumline(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drumline", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_the_bubble_is_printed_and_saved(folder: Path) -> None:
    words = ("train", "j.py", "--plan", "pp=2,micro=4", "--steps", "5", "--cluster", "dgx-h100")
    done = drumline(folder, *words, "-o", "run", "--json")
    assert done.returncode == 0, done.stderr
    division = json.loads(done.stdout)["division"]
    assert division["stages"] == ["layers.1"] and set(division["bubble"]) == {"predicted", "measured", "order"}
    assert 0.1 < division["bubble"]["measured"] < 0.5  # 1/5 where nothing else takes time
    assert "Pipeline bubble" in (folder / "run" / "report.html").read_text()
    done = drumline(folder, *words, "-o", "again")
    assert "bubble: predicted " in done.stdout and "stages begin at layers.1" in done.stdout


@pytest.mark.slow
def test_parameters_that_stay_whole_are_reported(folder: Path) -> None:
    done = drumline(folder, "verify", "j.py:tokens", "--plan", "tp=2", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "note: tp keeps 12 parameters whole: token.weight (a table of 11 rows)" in done.stdout
    done = drumline(folder, "train", "j.py:tokens", "--plan", "tp=2", "--steps", "2", "--cluster", "dgx-h100", "--json")
    left = json.loads(done.stdout)["division"]["left"]
    assert len(left) == 12 and left["norm.weight"] == "no matmul is split by it"
