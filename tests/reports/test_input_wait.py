"""A run that waited for its data says so."""

from __future__ import annotations

import dataclasses

import fake_run

from drumline.costs.input_pipeline import InputPipeline, with_input
from drumline.plans import Plan
from drumline.reports import Run
from drumline.reports.input_wait import input_sentence


def waiting(share: float) -> Run:
    run = fake_run.make_run()
    return dataclasses.replace(run, steps=tuple(dataclasses.replace(s, data_share=share) for s in run.steps))


def test_only_a_run_that_waited_says_so() -> None:
    assert input_sentence(waiting(0.05)) == "" and waiting(0.05).data_share == 0.05
    text = input_sentence(waiting(0.4))
    assert text.startswith("Input bounds the step: 40% of the time is spent waiting for data (")
    assert "predicted" not in text and "drumline pack" in text


def test_next_to_the_prediction() -> None:
    run = waiting(0.4)
    estimate = with_input(run.estimate, Plan.parse("dp=2"), InputPipeline(0.001, 16, cores=2))
    assert ", predicted 8" in input_sentence(dataclasses.replace(run, estimate=estimate))
