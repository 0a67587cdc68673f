"""Files that release 0.1 wrote (tests/data/release-0.1) are still read: cluster, plan, profile, run folder, checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import warm

import drumline as dl

OLD = Path(__file__).parent / "data" / "release-0.1"
LOSSES = json.loads((OLD / "losses.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def drumline(folder: Path, *words: str) -> dict[str, object]:
    done = warm.python("-m", "drumline", *words, "--json", cwd=folder, DRUMLINE_CACHE=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_cluster_file_keeps_every_number(folder: Path) -> None:
    cluster = dl.Cluster.load(folder / "cluster.toml")
    cluster.save(folder / "again.toml")
    assert dl.Cluster.load(folder / "again.toml") == cluster
    assert cluster.devices == 2 and cluster.measured and len(list(cluster.numbers())) > 500


def test_a_profile_and_a_plan(folder: Path) -> None:
    assert dl.Profile.load(folder / "profile.json").parameters == 58
    assert dl.Plan.load(folder / "plan.toml") == dl.Plan.parse(
        json.loads((OLD / "plan.json").read_text())["plans"][0]["plan"]
    )


def test_the_plans_have_the_prices_of_before(folder: Path) -> None:
    before = json.loads((OLD / "plan.json").read_text())["plans"]
    now = drumline(folder, "plan", "profile.json", "--cluster", "cluster.toml", "--no-corrections")["plans"]
    seconds = {row["plan"]: row["step_seconds"] for row in now}  # type: ignore[attr-defined]
    # 1%: release 0.1 priced the loss message of model-parallel plans too low
    assert seconds == pytest.approx({row["plan"]: row["step_seconds"] for row in before}, rel=0.01)


def test_a_run_folder_is_reported(folder: Path) -> None:
    (folder / "run" / "report.html").unlink(missing_ok=True)
    drumline(folder, "report", "run")
    assert "dp=2,zero=1" in (folder / "run" / "report.html").read_text()


@pytest.mark.parametrize(("run", "plan"), [("run", "dp=1"), ("run_tp", "dp=1"), ("run", "dp=2,zero=2")])
def test_a_checkpoint_is_resumed_under_another_plan(folder: Path, run: str, plan: str) -> None:
    resumed = drumline(
        folder,
        "train",
        "job.py",
        "--plan",
        plan,
        "--cluster",
        "cluster.toml",
        "--steps",
        "12",
        "--resume",
        f"{run}/checkpoints",
        "-o",
        "resumed",
    )
    assert resumed["losses"][-6:] == pytest.approx(LOSSES[-6:], rel=1e-4)  # type: ignore[index]
