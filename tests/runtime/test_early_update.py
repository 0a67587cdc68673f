"""The early update, decided on the device: the same as when the host decides, and skipped after a bad step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.runtime.engine import Engine, initialize


def job(clip: float | None = None, spoil: bool = False, weighted: bool = False) -> dl.Job:
    def loss(output: torch.Tensor, target: torch.Tensor) -> object:
        square = (output - target).square()
        return (square.sum(), 2.0 * square.numel()) if weighted else square.mean() * (math.nan if spoil else 1.0)

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, generator=generator), torch.randn(3, generator=generator)) for _ in range(16)]
    return dl.Job(
        model=lambda: nn.Linear(6, 3),
        loss=loss,
        data=lambda: data,
        batch_size=8,
        clip=clip,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    )


@pytest.fixture(autouse=True)
def _leaves() -> Iterator[None]:
    """A single rank has a process group too."""
    yield
    disconnect()


def trained(engine: Engine, steps: int = 4) -> dict[str, torch.Tensor]:
    for batch in engine.data(steps):
        engine.step(batch)
    return {k: v.clone() for k, v in engine.whole_parameters().items()}


def ahead(engine: Engine) -> Engine:
    """As on a GPU: the fused kernel of a CPU takes the same two inputs."""
    engine.update._on_gpu = True
    assert engine.update.decides_on_device
    return engine


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("plan", ["dp=1", "dp=1,zero=1", "dp=1,micro=2"])
def test_early_update_equals_normal_update(clip: float | None, weighted: bool, plan: str) -> None:
    first, second = initialize(job(clip, weighted=weighted), plan), initialize(job(clip, weighted=weighted), plan)
    assert first.update.decides_on_device == torch.cuda.is_available()  # a CPU gains nothing
    first.update._on_gpu = False
    a, b = trained(first), trained(ahead(second))
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-5)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert second.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]
    assert second.steps == first.steps == 4


def test_bad_step_changes_nothing() -> None:
    engine = ahead(initialize(job(spoil=True), "dp=1", guards=dl.Guards(nonfinite="skip")))
    before = {k: v.clone() for k, v in engine.whole_parameters().items()}
    after = trained(engine, 2)
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert (engine.steps, engine.position) == (0, 2)
    assert engine.note.startswith("skipped")
    assert engine.optimizer.param_groups[0]["lr"] == 0.1  # the schedule has not moved


def test_no_early_update_with_gradients_ready() -> None:
    engine = ahead(initialize(job(), "dp=1"))
    assert engine._may_update_early()
    seen = []
    engine.gradients_ready = lambda: seen.append(engine.steps)  # type: ignore[method-assign]  # this is what it is for
    assert not engine._may_update_early()
    trained(engine, 2)
    assert seen == [0, 1]


def test_no_early_update_when_replicas_are_compared() -> None:
    engine = ahead(initialize(job(), "dp=1", guards=dl.Guards(vote=2)))
    assert [engine.guard.compares(steps) for steps in range(4)] == [False, True, False, True]
    assert engine._may_update_early()
    trained(engine, 1)
    assert not engine._may_update_early()
