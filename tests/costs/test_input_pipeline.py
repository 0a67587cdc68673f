"""The data part of an estimate: loading between the steps, or behind them, and when it bounds the step."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.costs.estimate import Estimate
from drumline.costs.input_pipeline import InputPipeline, with_input
from drumline.plans import Plan

STEP = Estimate("dp=2", 0.01, {"forward": 0.01}, 1.0, {}, 2.0)


def made(plan: str = "dp=2", **changes: float) -> Estimate:
    pipeline = InputPipeline(**{"sample_seconds": 1e-3, "batch_size": 16, "cores": 64, **changes})  # type: ignore[arg-type]
    return with_input(STEP, Plan.parse(plan), pipeline)


def test_without_workers_a_rank_waits_for_all_of_its_loading() -> None:
    e = made()
    assert (e.data_seconds, e.data_wait_seconds) == (pytest.approx(8e-3), pytest.approx(8e-3))
    assert e.step_seconds == STEP.step_seconds and e.parts == STEP.parts, "the step is measured without it"
    assert "input bounds the step (workers=1 in the Job would hide it)" in e.input_text
    assert made("dp=1").data_seconds == pytest.approx(16e-3)
    assert made("pp=2,micro=2").data_seconds == pytest.approx(16e-3), "each stage's rank loads the whole batch"
    assert made(batch_size=17).data_seconds == pytest.approx(9e-3), "the rank with the most samples counts"


def test_workers_hide_what_is_shorter_than_the_step() -> None:
    assert made(workers=1).data_wait_seconds == 0 and made(workers=1).input_text.endswith("hidden behind the step")
    slow = made(workers=1, sample_seconds=4e-3)
    assert slow.data_wait_seconds == pytest.approx(32e-3 - 10e-3) and "workers=4" in slow.input_text
    assert made(workers=4, sample_seconds=4e-3).data_wait_seconds == 0


def test_workers_with_whole_batches_load_at_the_same_time() -> None:
    assert made("dp=2,sync=async").data_seconds == pytest.approx(16e-3), "of a batch"
    assert made("dp=2,sync=async").data_wait_seconds == pytest.approx(8e-3), "two are loaded at once"
    assert made("dp=2,sync=async", workers=1).data_wait_seconds == 0, "a worker computes for two steps"
    slow = made("dp=2,sync=hogwild", workers=1, sample_seconds=4e-3)
    assert slow.data_wait_seconds == pytest.approx(32e-3 - 10e-3)
    assert made("dp=2,sync=server,servers=4", cores=2).data_wait_seconds == pytest.approx(8e-3), "servers load nothing"


def test_processes_share_the_cores() -> None:
    one = made(cores=1)
    assert one.data_wait_seconds == pytest.approx(2 * 8e-3)
    assert made(cores=1, workers=8).data_wait_seconds == pytest.approx(16e-3 - 10e-3)
    assert "drumline pack" in made(cores=1, workers=8).input_text


def test_a_short_wait_bounds_nothing() -> None:
    assert "bounds" not in made(sample_seconds=1e-4).input_text
    assert "bounds" in made(sample_seconds=2e-4).input_text


def test_file_form(tmp_path: object) -> None:
    e = made()
    from pathlib import Path

    path = Path(str(tmp_path)) / "estimate.json"
    e.save(path)
    assert Estimate.load(path) == e
    STEP.save(path)
    assert "data_seconds" not in path.read_text() and Estimate.load(path) == STEP
    assert dataclasses.replace(e).fits
