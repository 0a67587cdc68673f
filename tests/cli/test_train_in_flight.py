"""`drumline train`, `verify` and `simulate` with pipelines that do not drain between batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.loop.simulate import simulate

HERE = Path(__file__).parents[1]
JOB = """
import sys
sys.path.append({path!r})
import small_jobs


def job():
    return small_jobs.make("mlp", clip=None)


def tokens():
    return small_jobs.make("gpt")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "j.py").write_text(JOB.format(path=str(HERE)))
    return tmp_path


def drumline(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drumline", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def losses(folder: Path, run: str) -> list[float]:
    lines = (folder / run / "steps.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records] == list(range(len(records)))
    assert all(r["seconds"] > 0 for r in records)
    return [r["loss"] for r in records]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan"), [("j.py", "pp=2,schedule=pipedream"), ("j.py:tokens", "pp=2,micro=2,schedule=pipedream-2bw")]
)
def test_training_and_resuming(folder: Path, job: str, plan: str) -> None:
    """A resumed run equals one that went on after it had saved at the same step."""
    words = ("train", job, "--plan", plan, "--cluster", "dgx-h100", "--save-every", "6")
    done = drumline(folder, *words, "--steps", "12", "-o", "whole")
    assert "bubble: predicted " in done.stdout and "step 12/12" in done.stdout
    drumline(folder, *words, "--steps", "6", "-o", "part")
    done = drumline(folder, *words, "--steps", "12", "-o", "part", "--resume", "auto")
    assert "resumed: " in done.stdout
    assert losses(folder, "part") == losses(folder, "whole")
    assert len(losses(folder, "whole")) == 12
    assert "Pipeline bubble" in (folder / "whole" / "report.html").read_text()


@pytest.mark.slow
def test_verify_names_its_reference(folder: Path) -> None:
    done = drumline(folder, "verify", "j.py", "--plan", "pp=3,schedule=pipedream", "--steps", "6")
    assert "older by 2, 1, 0 updates in stages 0 to 2" in done.stdout
    assert "passed: dp=1,pp=3,schedule=pipedream computes what one device with these delays computes" in done.stdout
    done = drumline(folder, "verify", "j.py:tokens", "--plan", "pp=2,schedule=pipedream", code=2)
    assert "clip=0.1 with schedule=pipedream" in done.stderr


def test_simulate_draws_the_schedules(folder: Path) -> None:
    done = drumline(folder, "simulate", "pipeline:pipedream", "--ranks", "4", "--micro", "8")
    assert "stage 3 .  .  .  F0 B0 U0 F1 B1 U1" in done.stdout
    assert "versions of the weights, by stage: 4, 3, 2, 1" in done.stdout
    assert "staleness, by stage: 3, 2, 1, 0" in done.stdout
    document = json.loads(
        drumline(folder, "simulate", "pipeline:pipedream-2bw", "-n", "2", "--micro", "6", "--json").stdout
    )
    assert document["versions"] == [2, 1] and document["staleness"] == [[0, 1, 1], [0, 1, 1]]


def test_a_step_is_simulated_as_it_is_priced() -> None:
    for plan in ("pp=4,schedule=pipedream,precision=bf16", "pp=4,micro=8,schedule=pipedream-2bw,precision=bf16"):
        replay = simulate("gpt:1.3b", plan, "dgx-a100")
        assert replay.estimate is not None
        assert replay.step_seconds == pytest.approx(replay.estimate.step_seconds, rel=1e-6)
        assert replay.planned_seconds is not None and replay.planned_seconds > 0
