"""The first batch's graph is captured once: the first program is made of it, unless it would be captured differently."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import small_jobs
import torch
import torch.nn.functional as F
from torch import nn
from world import World

from drumline.core.job import Job
from drumline.partition.capture_conditions import captured_within
from drumline.plans import Plan
from drumline.runtime.engine import initialize
from drumline.runtime.parallel.job_capture import JobCapture, JobGraph
from drumline.runtime.verification.modes import Float64Mode, NoRandomness
from drumline.runtime.verification.verify import build_engine, run_plan


def captures_of_three_steps(job: str, plan: str, verified: bool) -> int:
    """The graphs captured for steps that all have the first micro-batch's shape."""
    with mock.patch.object(JobCapture, "capture", autospec=True, side_effect=JobCapture.capture) as capture:
        made = small_jobs.make(job, batch_size=4)
        if verified:
            run_plan(build_engine(made, Plan.parse(plan), exact=True), 3, set())
        else:
            engine = initialize(made, Plan.parse(plan))
            for batch in engine.data(3):
                engine.step(batch)
        return capture.call_count


@pytest.mark.parametrize(
    ("job", "plan"), [("gpt", "tp=2"), ("gpt", "pp=2,micro=2"), ("resnet", "tile=2x1"), ("lstm", "pp=2,micro=2")]
)
@pytest.mark.parametrize("verified", [False, True])
def test_one_graph_for_one_shape(world: Callable[[int], World], job: str, plan: str, verified: bool) -> None:
    """A verification turns off the dropout of the GPT, which changes its graph."""
    captures = 1 + (verified and job == "gpt")
    assert world(2).run(captures_of_three_steps, job, plan, verified) == [captures, captures]


class Settings(nn.Module):
    """Its graph depends on numbers, on functions and on lists that it has as attributes."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])
        self.scale, self.powers, self.rate = 1.0, [1, 2], rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        y = sum(y**p for p in self.powers) * self.scale
        return self.layers[1](F.dropout(y, self.rate) if self.rate else y)  # type: ignore[no-any-return]


def captured(model: Callable[[], nn.Module] = Settings) -> tuple[JobCapture, JobGraph]:
    job = small_jobs.make("mlp", model=model, batch_size=4)
    capture = JobCapture(job, Plan.parse("tp=2"), torch.device("cpu"), torch.float64)
    return capture, capture.capture_first(1)


def batch(samples: int = 4, kind: Any = torch.float64) -> Any:
    return torch.zeros(samples, 6, dtype=kind), torch.zeros(samples, dtype=torch.int64)


def again(capture: JobCapture, graph: JobGraph, value: Any = None, training: bool = True) -> bool:
    value = value or batch()
    return capture.would_capture(graph, value, len(value[0]), training=training)


def test_the_same_batch_gives_the_same_graph() -> None:
    capture, graph = captured()
    assert again(capture, graph) and again(capture, graph)


@pytest.mark.parametrize(
    "value", [batch(3), batch(4, torch.float32), [*batch()], (torch.zeros(6, 4).double().T, *batch()[1:])]
)
def test_another_form_of_batch_is_captured(value: Any) -> None:
    assert not again(*captured(), value)


def test_evaluation_is_captured() -> None:
    assert not again(*captured(), training=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", 2.0),
        lambda m: setattr(m, "scale", 1),
        lambda m: m.powers.append(3),
        lambda m: setattr(m, "more", None),
        lambda m: setattr(m, "forward", lambda x: m.layers[1](x)),
        lambda m: m.layers.append(nn.Identity()),
        lambda m: m.layers[0].requires_grad_(False),
        lambda m: m.layers[0].register_forward_hook(lambda *_: None),
    ],
    ids=["number", "type", "list", "new", "function", "module", "frozen", "hook"],
)
def test_a_changed_model_is_captured(change: Callable[[nn.Module], Any]) -> None:
    capture, graph = captured()
    change(capture.template)
    assert not again(capture, graph)


@pytest.mark.parametrize(
    "mode", [Float64Mode, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.set_grad_enabled(False)]
)
def test_another_mode_is_captured(mode: Callable[[], Any]) -> None:
    capture, graph = captured()
    with mode():
        assert not again(capture, graph)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_without_random_operators_their_mode_changes_nothing(rate: float) -> None:
    capture, graph = captured(lambda: Settings(rate))
    with NoRandomness():
        assert again(capture, graph) == (rate == 0.0)


def test_modes_entered_for_the_capture_count() -> None:
    with captured_within(Float64Mode):
        capture, graph = captured()
    assert not again(capture, graph)
    with ExitStack() as stack:
        stack.enter_context(NoRandomness())
        stack.enter_context(Float64Mode())
        assert again(capture, graph)


@pytest.mark.parametrize(("rate", "random"), [(0.0, False), (0.1, True)])
def test_attention_and_recurrent_layers_are_random_with_dropout_only(rate: float, random: bool) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 6, 2, batch_first=True, dropout=rate), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lstm(x[:, None])[0]
            return self.head(F.scaled_dot_product_attention(y, y, y, dropout_p=rate)[:, 0])  # type: ignore[no-any-return]

    capture, graph = captured(Layers)
    with NoRandomness():
        assert again(capture, graph) != random


def test_the_job_is_not_changed_by_the_question() -> None:
    capture, graph = captured()
    before = [dict(vars(m)) for m in capture.template.modules()]
    again(capture, graph)
    assert [dict(vars(m)) for m in capture.template.modules()] == before
    assert isinstance(capture.job, Job)
