"""`drumline report` of several runs: the table, the page, JSON, and folders that cannot be read."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from command import here

import drumline as dl
from drumline.core.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1] / "reports"))
from fake_run import make_run, make_waiting_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind in ("sync", "async"):
        make_waiting_run(kind).save(tmp_path / "runs" / f"gpt-{kind}")
    return tmp_path


def test_two_runs(folder: Path) -> None:
    done = here("report", "runs/gpt-sync", "runs/gpt-async", cwd=folder)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    words = " ".join(done.stdout.split())  # however wide the console is
    assert "gpt-async reached a loss of" in words and "dp=4,sync=async" in "".join(words.split())
    assert f"report:{folder / 'runs' / 'comparison.html'}" in "".join(words.split())
    assert "Loss against seconds" in (folder / "runs" / "comparison.html").read_text(encoding="utf-8")
    assert not (folder / "runs" / "gpt-sync" / "report.html").exists()


def test_json_and_output(folder: Path) -> None:
    done = here("report", "runs/gpt-sync", "runs/gpt-async", "--json", "-o", "page.html", "--loss", "2", cwd=folder)
    document = json.loads(done.stdout)
    assert document["loss"] == 2.0 and document["page"] == "page.html" and (folder / "page.html").exists()
    assert [run["plan"] for run in document["runs"]] == ["dp=4", "dp=4,sync=async"]
    assert all(run["steps_to_loss"] and run["losses"] and run["seconds_to_loss"] > 0 for run in document["runs"])


def test_folders_that_cannot_be_read_are_named(folder: Path) -> None:
    make_run().save(folder / "runs" / "broken")
    (folder / "runs" / "broken" / "profile.json").write_text("{}")
    done = here("report", "runs/gpt-sync", "runs/missing", "runs/broken", cwd=folder)
    assert done.returncode == 0 and "gpt-sync" in done.stdout
    assert "runs/missing is left out: no run at runs/missing" in done.stderr
    assert "runs/broken is left out" in done.stderr and "profile.json" in done.stderr
    page = (folder / "runs" / "comparison.html").read_text(encoding="utf-8")
    assert "runs/missing: no run at runs/missing" in page and "profile.json is damaged" in page
    done = here("report", "runs/missing", "runs/broken", cwd=folder)
    assert done.returncode == 6 and "none of 2 runs can be shown" in done.stderr
    assert "runs/missing" in done.stderr and "profile.json" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("runs/gpt-sync", "runs/gpt-async", "--trace", "t.json"), "--trace with several runs"),
        (("runs/gpt-sync", "--loss", "2"), "--loss 2 with one run"),
        (("runs/gpt-sync", "runs/gpt-async", "--loss", "nan"), "--loss nan"),
        (("runs/gpt-sync", "runs/gpt-async", "--loss", "low"), "Invalid value for '--loss'"),
    ],
)
def test_refused(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    done = here("report", *arguments, cwd=folder)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_the_same_run_twice_is_one_run(folder: Path) -> None:
    done = here("report", "runs/gpt-sync", "runs/../runs/gpt-sync", "--json", cwd=folder)
    assert len(json.loads(done.stdout)["runs"]) == 1


def test_different_jobs_are_noted(folder: Path) -> None:
    dataclasses.replace(make_waiting_run("local"), job="other.py:job").save(folder / "runs" / "gpt-local")
    done = here("report", "runs/gpt-sync", "runs/gpt-local", cwd=folder)
    assert done.returncode == 0 and "note: The runs are of different jobs" in done.stdout


def test_as_a_verb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    runs = [folder / "runs" / "gpt-sync", make_waiting_run("local")]
    assert dl.report(runs) == folder / "runs" / "comparison.html"
    assert dl.report([make_waiting_run("sync"), make_waiting_run("local")], output="x.html").name == "x.html"
    assert dl.report([folder / "runs" / "gpt-sync"]).name == "report.html"
    assert dl.report((folder / "runs" / "gpt-sync",)).parent.name == "gpt-sync"
    with pytest.raises(InputError, match="compares several runs"):
        dl.report(runs[0], loss=2.0)
