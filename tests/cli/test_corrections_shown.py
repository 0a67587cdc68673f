"""Corrections on the command line: a run is kept, the next prediction says so, and all of it can be removed.

The tests follow one another: the second and the third read what the runs of the first taught.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import here

from drumline.clusters import Cluster, DeviceSpec, Link, Node

JOB = """
import torch
from torch import nn
import drumline as dl

def made(width):
    return dl.Job(model=lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)),
                  loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                  data=lambda: [(torch.full((6,), float(i)), i % 3) for i in range(40)], batch_size=8, steps=7)

def job(): return made(8)
def other(): return made(16)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, and a cluster file marked as measured, with wrong numbers on purpose."""
    folder = tmp_path_factory.mktemp("corrected")
    (folder / "j.py").write_text(JOB)
    device = DeviceSpec("cpu", "cpu", 1e10, 1e10, {"fp32": 1e10}, 1e-5, threads=1)
    Cluster(
        "mine", device, Node(2, Link(1e-4, 1e9)), origin={"": "measured", "device": "measured", "node": "measured"}
    ).save(folder / "mine.toml")
    return folder


def drumline(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return here(*arguments, cwd=folder, DRUMLINE_CACHE=str(folder))


def planned(folder: Path, job: str = "job", *arguments: str) -> dict[str, Any]:
    done = here("plan", f"j.py:{job}", "--cluster", "mine.toml", "--plan", "dp=1", "--json", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_run_corrects_the_next_prediction(folder: Path) -> None:
    before = planned(folder)
    assert before["correction"] == "" and all(
        p["step_seconds"] == p["uncorrected_step_seconds"] for p in before["plans"]
    )
    command = ("train", "j.py", "--plan", "dp=1", "--cluster", "mine.toml")
    done = drumline(folder, *command, "-o", "first")
    assert done.returncode == 0, done.stderr
    assert "corrected by" not in done.stdout and "recorded for corrections: mine.corrections.json, 1 run" in done.stdout

    done = drumline(folder, *command, "-o", "second", "--json")
    document = json.loads(done.stdout)
    assert "corrected by 1 run on this machine, 1 of them of this job" in document["correction"]
    assert document["predicted_step_seconds"] != document["uncorrected_step_seconds"]
    assert document["uncorrected_step_seconds"] == pytest.approx(before["given"]["step_seconds"])
    assert len(json.loads((folder / "mine.corrections.json").read_text())["runs"]) == 2
    assert "It is corrected by 1 run on this machine" in (folder / "second" / "report.html").read_text()
    assert "corrected by" not in (folder / "first" / "report.html").read_text()

    after = planned(folder)
    assert (
        after["given"]["uncorrected_step_seconds"] == before["given"]["step_seconds"] != after["given"]["step_seconds"]
    )
    assert "2 of them of this job" in after["given"]["correction"]
    another = planned(folder, "other")["given"]
    assert (
        "none of this job" in another["correction"] and another["step_seconds"] != another["uncorrected_step_seconds"]
    )
    plain = planned(folder, "job", "--no-corrections")
    loading = {"data_seconds", "data_wait_seconds", "input"}  # measured anew for each answer
    assert {k: v for k, v in plain["given"].items() if k not in loading} == {
        k: v for k, v in before["given"].items() if k not in loading
    }
    assert [p["plan"] for p in plain["plans"]] == [p["plan"] for p in before["plans"]]
    shown = here("plan", "j.py", "--cluster", "mine.toml", "--formula", cwd=folder).stdout
    assert "corrected by 2 runs on this machine" in shown and "without" in shown and "before correction = " in shown


def test_profile_predicts_for_this_machine(folder: Path) -> None:
    from drumline.loop.measure import cached_cluster, local_devices

    env = {"DRUMLINE_CACHE": str(folder / "cache")}
    (folder / "cache").mkdir()
    assert "here: step" not in here("profile", "j.py", cwd=folder, **env).stdout
    name = cached_cluster(local_devices()).name
    (folder / "cache" / name).write_bytes((folder / "mine.toml").read_bytes())
    kept = folder / "cache" / f"{name.removesuffix('.toml')}.corrections.json"
    kept.write_bytes((folder / "mine.corrections.json").read_bytes())
    assert "on one device, corrected by 2 runs on this machine" in here("profile", "j.py", cwd=folder, **env).stdout
    document = json.loads(here("profile", "j.py", "--json", cwd=folder, **env).stdout)["here"]
    assert document["step_seconds"] != document["uncorrected_step_seconds"]
    assert "here: step" not in here("profile", "j.py", "--no-corrections", cwd=folder, **env).stdout
    (folder / "cache" / name).write_text("name = 1")
    done = here("profile", "j.py", cwd=folder, **env)
    assert done.returncode == 0 and f"{name} is not used: 3 keys are wrong or missing" in done.stderr
    assert f"removed {kept}" in here("measure", "--forget", **env).stdout and not kept.exists()
    assert "nothing to forget" in here("measure", "--forget", **env).stdout


def test_damaged_and_outdated_files_are_named_and_not_used(folder: Path) -> None:
    path = folder / "mine.corrections.json"
    good = path.read_text()
    for text, words in (
        ("{", "is damaged (JSON"),
        ('{"format": 9}', "later drumline (format 9; this one reads up to 1)"),
    ):
        path.write_text(text)
        done = here("plan", "j.py", "--cluster", "mine.toml", "--json", cwd=folder)
        assert done.returncode == 0 and json.loads(done.stdout)["correction"] == ""
        assert words in done.stderr and "mine.corrections.json is not used: " in done.stderr
    path.write_text(good)
    measured = (folder / "mine.toml").read_text()
    (folder / "mine.toml").write_text(measured + "\n# measured anew\n")
    done = here("plan", "j.py", "--cluster", "mine.toml", "--json", cwd=folder)
    assert json.loads(done.stdout)["correction"] == ""
    assert (
        "2 of 2 runs in mine.corrections.json are not used: they belong to another measurement or torch version"
        in done.stderr
    )
    (folder / "mine.toml").write_text(measured)
    document = json.loads(here("measure", "--forget", "-o", "mine.toml", "--json", cwd=folder).stdout)
    assert document == {"removed": ["mine.corrections.json"]} and not path.exists()


@pytest.mark.slow
def test_short_runs_and_data_sheets_teach_nothing(folder: Path) -> None:
    done = drumline(folder, "train", "j.py", "--plan", "dp=1", "--cluster", "mine.toml", "-o", "short", "--steps", 4)
    assert "not used for corrections: 1 counted steps, at least 3 are needed" in done.stdout, done.stderr
    done = drumline(folder, "train", "j.py", "--plan", "dp=1", "--cluster", "dgx-h100", "-o", "sheet")
    assert done.returncode == 0 and "corrections" not in done.stdout
    assert not list(folder.glob("*.corrections.json"))
