"""`drumline plan --dry-run` and `drumline profile --dry-run` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import here

from drumline.runtime.dry_run import DryRun

JOB = """
import torch
import drumline as dl


class Reads(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(x.sum())


def made(layer=torch.nn.Linear, width=64):
    return dl.Job(
        model=lambda: torch.nn.Sequential(layer(width, width), torch.nn.GELU(), torch.nn.Linear(width, 4)),
        loss=torch.nn.functional.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p),
        data=lambda: [(torch.zeros(width), 0)] * 64, batch_size=16,
    )


def job():
    return made()


def reads():
    return made(Reads)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def test_every_message_of_a_plan(folder: Path) -> None:
    done = here("profile", "job.py", "--dry-run", "dp=4,zero=1", "-o", "dry.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "dp=4,zero=1: one step on 4 ranks" in done.stdout
    assert "rank 0: peak" in done.stdout and "parameters 17.3 KiB" in done.stdout
    assert "backward: reduce_scatter 17.3 KiB, ranks 0 to 3" in done.stdout
    assert "optimizer: all_gather 17.3 KiB, ranks 0 to 3" in done.stdout
    assert DryRun.load(folder / "dry.json").world == 4


def test_as_json_and_in_forty_columns(folder: Path) -> None:
    done = here("profile", "job.py", "--dry-run", "dp=2", "--json", cwd=folder)
    value = json.loads(done.stdout)["dry_run"]
    assert value["plan"] == "dp=2" and value["ranks"][0]["peak"] > 0
    narrow = here("profile", "job.py", "--dry-run", "dp=2", cwd=folder, COLUMNS="40")
    assert max(map(len, narrow.stdout.splitlines())) <= 40


def test_the_finalists_are_dry_run(folder: Path) -> None:
    done = here("plan", "job.py", "--cluster", "dgx-h100", "--devices", 2, "--dry-run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    runs = value["dry_run"]["runs"]
    assert [r["plan"] for r in runs] == [p["plan"] for p in value["plans"][:3]]
    assert all(r["peak_bytes"] > 0 and r["closed_form_bytes"] > 0 for r in runs) and not value["dry_run"]["dropped"]
    shown = here("plan", "job.py", "--cluster", "dgx-h100", "--devices", 2, "--dry-run", cwd=folder)
    assert "Dry run of the finalists" in shown.stdout and "closed form" in shown.stdout


def test_a_plan_that_fails_is_not_proposed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan fails: the answer is the best of the others, with the reason."""
    from drumline.core.errors import PlanError
    from drumline.runtime import dry_run

    plain, seen = dry_run.dry_run, []

    def first_fails(job: object, plan: object, **named: object) -> DryRun:
        seen.append(str(plan))
        if len(seen) == 1:
            raise PlanError("the dry run failed on purpose")
        return plain(job, plan, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(dry_run, "dry_run", first_fails)
    done = here("plan", "job.py", "--cluster", "dgx-h100", "--devices", 2, "--dry-run", "--json", cwd=folder)
    value = json.loads(done.stdout)
    assert value["dry_run"]["dropped"] == {seen[0]: "the dry run failed on purpose"}
    assert seen[0] not in [p["plan"] for p in value["plans"]]
    assert value["plans"][0]["plan"] == seen[1] and len(seen) == 4


def test_a_model_that_reads_values_is_planned_but_not_run(folder: Path) -> None:
    done = here("plan", "job.py:reads", "--cluster", "dgx-h100", "--devices", 2, "--dry-run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)["dry_run"]
    assert not value["runs"] and "cannot be traced" in next(iter(value["unknown"].values()))


def test_a_dry_run_needs_a_job() -> None:
    for words in (
        ("plan", "gpt:1.3b", "--cluster", "dgx-h100", "--dry-run"),
        ("profile", "gpt:1.3b", "--dry-run", "dp=2"),
    ):
        done = here(*words)
        assert done.returncode == 2 and "needs a job" in done.stderr
