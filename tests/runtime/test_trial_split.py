"""The trial split before any rank is started: refuses as the engine would; `auto` chooses another plan and reports it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_splits
import pytest
import small_jobs
import torch
from command import here
from torch import nn

from drumline.core.errors import DrumlineError, PlanError, TraceError
from drumline.loop.forecast import best_runnable
from drumline.planner.answer import Answer, Candidate
from drumline.plans import Plan
from drumline.runtime.parallel.trial_split import try_split


@pytest.mark.parametrize(
    ("job", "plan", "words"),
    [
        ("mlp", "pp=2,virtual=4,schedule=interleaved,micro=2", "8 stages for a model of 5 layers"),
        ("heads", "tp=2", "tp=2 cannot share the 3 heads"),
        ("asking", "pp=2", "Asking cannot be traced"),
        ("mlp", "tile=2x1", "tile for a batch without images"),
        ("mlp", "pp=2,split=blocks.9", "split=blocks.9"),
        ("mlp", "pp=2,virtual=2", "1f1b with 2 stages per rank"),
        ("lstm", "tp=2", "no layer of this model"),
    ],
)
def test_refused_as_by_the_engine(job: str, plan: str, words: str) -> None:
    with pytest.raises(DrumlineError, match=words):
        try_split(bad_splits.make(job), Plan.parse(plan))


@pytest.mark.parametrize(
    "plan", ["tp=2", "pp=2,micro=2", "cp=2", "pp=2,dp=2,tp=2,micro=2", "pp=2,split=measured,micro=2"]
)
def test_valid_plans_pass(plan: str) -> None:
    division = try_split(small_jobs.make("gpt"), Plan.parse(plan))
    assert bool(division.left) == ("tp" in plan) and bool(division.stages) == ("pp" in plan)


class Hooked(nn.Module):
    """A hook on a tensor: it runs, and it is traced, but it would be lost in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if torch.is_grad_enabled():
            y.register_hook(lambda g: g * 2)
        return self.head(y)  # type: ignore[no-any-return]  # a tensor


def answer(*plans: str) -> Answer:
    return Answer(tuple(Candidate(Plan.parse(p), 1.0, 1.0, not p.startswith("dp=9"), "") for p in plans), 0.0, "")


def test_auto_skips_models_that_cannot_be_captured() -> None:
    job = small_jobs.make("mlp", model=Hooked)
    chosen, why = best_runnable(job, answer("dp=1,pp=2", "dp=1,tp=2", "dp=2", "dp=1"))
    assert str(chosen) == "dp=2"
    assert why.startswith("no plan that splits the model was chosen: ") and "\n" not in why


def test_auto_skips_a_refused_plan() -> None:
    chosen, why = best_runnable(bad_splits.make("heads"), answer("dp=1,tp=2", "dp=1,pp=2", "dp=2"))
    assert str(chosen) == "dp=1,pp=2"
    assert why == "dp=1,tp=2 was not chosen: tp=2 cannot share the 3 heads of block"


def test_auto_without_a_valid_plan() -> None:
    with pytest.raises(TraceError):
        best_runnable(small_jobs.make("mlp", model=Hooked), answer("dp=1,pp=2", "dp=9"))
    with pytest.raises(PlanError, match="3 heads"):
        best_runnable(bad_splits.make("heads"), answer("dp=1,tp=2"))


def test_valid_plan_is_kept() -> None:
    assert best_runnable(small_jobs.make("mlp"), answer("dp=1,pp=2", "dp=2")) == (Plan(pp=2), "")
    assert best_runnable(small_jobs.make("mlp", model=Hooked), answer("dp=2", "dp=1,pp=2")) == (Plan(dp=2), "")


JOB = """
import sys
sys.path += {paths!r}
import bad_splits


def job():
    return bad_splits.make("mlp")
"""


def test_too_many_stages_are_refused_before_the_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    (tmp_path / "j.py").write_text(JOB.format(paths=paths))

    def measured(*_: Any, **__: Any) -> Callable[..., Any]:
        raise AssertionError("the machine was measured")

    monkeypatch.setattr("drumline.loop.measure.this_machine", measured)
    done = here("train", "j.py", "--plan", "pp=2,virtual=4,schedule=interleaved,micro=2", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "8 stages for a model of 5 layers" in done.stderr and "pp x virtual = 5 or less" in done.stderr


def test_ranks_that_were_started_are_all_used() -> None:
    chosen, _ = best_runnable(small_jobs.make("mlp"), answer("dp=1", "dp=1,pp=2", "dp=3", "dp=2"), processes=3)
    assert chosen == Plan(dp=3)
    with pytest.raises(PlanError, match="no plan for exactly 5 ranks fits"):
        best_runnable(small_jobs.make("mlp"), answer("dp=1", "dp=2"), processes=5)
