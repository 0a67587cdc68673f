"""Dry runs: plans that fail are dropped, and no more are tried than needed."""

from __future__ import annotations

import pytest

from drumline.clusters import load
from drumline.core.errors import PlanError
from drumline.costs import Estimate
from drumline.models import zoo
from drumline.planner import search
from drumline.planner.dry_runs import WANTED, drop_failed
from drumline.plans import Plan


def scored(count: int) -> list[tuple[Plan, Estimate]]:
    return [(Plan(dp=n), Estimate(f"dp={n}", float(n), {}, 0.0, {}, 1.0)) for n in range(1, count + 1)]


def test_plans_that_pass_come_first() -> None:
    seen: list[int] = []

    def dry_run(plan: Plan, estimate: Estimate) -> str:
        seen.append(plan.dp)
        return "odd" if plan.dp % 2 else ""

    passed = drop_failed(scored(10), dry_run)
    assert seen == [1, 2, 3, 4, 5, 6] and len([n for n in seen if n % 2 == 0]) == WANTED
    assert [plan.dp for plan, _ in passed] == [2, 4, 6, 7, 8, 9, 10]
    assert drop_failed(scored(3), None) == scored(3)
    with pytest.raises(PlanError, match="none of the 3 best plans passes its dry run") as e:
        drop_failed(scored(3), lambda plan, _: "never")
    assert e.value.where == "dp=1: never"
    assert drop_failed([], lambda plan, _: "never") == []


def test_a_search_does_not_propose_failed_plans() -> None:
    profile, cluster = zoo.profile("gpt:125m", batch_size=32), load("dgx-h100").with_devices(4)
    best = search(profile, cluster, brief=True)[0].best.plan
    again, estimates = search(profile, cluster, brief=True, dry_run=lambda plan, _: "no" if plan == best else "")
    assert best not in [c.plan for c in again.candidates] and str(best) not in estimates
