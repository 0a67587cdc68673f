"""The benchmark of predictions on a CPU: its table and its verdicts on made-up runs, and that its jobs can be traced."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from drumline.clusters import Cluster, load
from drumline.core.job import Job
from drumline.costs import estimate
from drumline.costs.observed_runs import observed_run
from drumline.models import Profile, zoo
from drumline.plans import Plan

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def ran(name: str, profile: Profile, cluster: Cluster, factor: float) -> Any:
    """A run that took `factor` times as long as predicted."""
    import predict_cpu

    plan = Plan.parse("dp=2")
    raw = estimate(profile, plan, cluster)
    phases = {k: factor * v for k, v in raw.parts.items() if k in ("forward", "backward", "optimizer")}
    seconds = factor * raw.step_seconds
    seen = observed_run(
        profile,
        plan,
        raw,
        step_seconds=seconds,
        phases=[phases] * 2,
        each=[seconds] * 13,
        when="2026-01-01",
        torch="",
        measurement="",
    )
    return predict_cpu.Ran(predict_cpu.Case(name, plan, profile, cluster), seconds, 1.0, seen)


def test_the_table_and_the_verdicts() -> None:
    import predict_cpu

    cluster = load("dgx-h100").with_devices(2)
    models = {name: zoo.profile(name, batch_size=16) for name in ("gpt:125m", "gpt:350m", "vgg16")}
    first = [ran(name, profile, cluster, 1.25) for name, profile in models.items()]
    second = [ran(name, profile, cluster, 1.25) for name, profile in models.items()]
    lines = predict_cpu.page(first, second)
    assert sum(line.startswith("| gpt") for line in lines) == 2 and "-20.0%" in lines[2]
    text = "\n".join(lines)
    assert "mean error 20.0% (worst 20.0%); at most 15% was expected: missed" in text
    assert "at most half was expected: kept" in text and "it helps a job that never ran here" in text
    assert "as a prediction of the second: 0.0% (worst 0.0%)" in text
    changed = [dataclasses.replace(r, seconds=r.seconds / 1.25**2) for r in second]  # a machine that does the opposite
    text = "\n".join(predict_cpu.page(first, changed))
    assert "at most half was expected: missed" in text and "it does not help" in text
    assert "as a prediction of the second: 56.2% (worst 56.2%)" in text


def test_the_page_has_its_marks() -> None:
    import predict_cpu

    text = predict_cpu.PAGE.read_text(encoding="utf-8")
    assert text.index("<!-- here -->") < text.index("<!-- /here -->")


@pytest.mark.parametrize("name", ["gpt", "cnn", "mlp", "unet", "lstm", "moe"])
def test_the_jobs_can_be_traced(name: str) -> None:
    import cpu_jobs

    from drumline.tracing import trace

    assert name in cpu_jobs.NAMES
    job = Job.load(f"{BENCHMARKS / 'cpu_jobs.py'}:{name}")
    work = trace(job).flops().at(job.batch_size)
    assert 2e9 < work < 5e10  # tenths of a second on two cores
