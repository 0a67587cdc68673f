"""Optimizations of the host's part of a step; they change nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.runtime.engine import initialize
from drumline.runtime.numerics.constants import constant
from drumline.runtime.state.buffer_snapshot import BufferSnapshot


class Model(nn.Module):
    """Records whether the garbage collector may run, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.collects: list[bool] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.collects.append(gc.isenabled())
        if self.fails:
            raise ZeroDivisionError
        return self.layer(x)


def job() -> dl.Job:
    data = [(torch.ones(2), torch.ones(1)) for _ in range(4)]
    return dl.Job(
        model=Model,
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p),
        data=lambda: data,
        batch_size=4,
    )


@pytest.fixture(autouse=True)
def _leaves() -> Iterator[None]:
    yield
    gc.enable()
    disconnect()


BATCH = (torch.ones(4, 2), torch.ones(4, 1))


@pytest.mark.parametrize(("plan", "within"), [("dp=1", [False]), ("dp=1,micro=2", [True, True])])
def test_garbage_is_collected_after_a_step(plan: str, within: list[bool]) -> None:
    """With micro-batches as ever: cycles of the first may hold memory that the second needs."""
    engine = initialize(job(), plan)
    engine.step(BATCH)
    assert isinstance(engine.model, Model) and engine.model.collects == within
    assert gc.isenabled()
    engine.model.fails = True
    with pytest.raises(ZeroDivisionError):
        engine.step(BATCH)
    assert gc.isenabled()


def test_users_choice_of_no_collection_is_kept() -> None:
    engine = initialize(job(), "dp=1")
    gc.disable()
    engine.step(BATCH)
    assert not gc.isenabled()


def test_settled_buffers_are_copied_and_changes_noticed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model.register_buffer("mask", torch.ones(2))
    snapshot = BufferSnapshot(model)
    for _ in range(5):
        snapshot.save()
        before = {k: v.clone() for k, v in model.named_buffers()}
        model(torch.randn(8, 2))
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    assert snapshot._settled is not None
    snapshot.restore()
    assert all(torch.equal(v, before[k]) for k, v in model.named_buffers())
    snapshot.save()
    model.mask.mul_(3.0)  # a constant that changes later is copied from then on
    snapshot.save()
    model.mask.mul_(3.0)
    snapshot.restore()
    assert torch.equal(model.mask, torch.full((2,), 3.0))
    model[0].running_mean = torch.full((2,), 7.0)  # another tensor
    snapshot.save()
    model(torch.randn(8, 2))
    snapshot.restore()
    assert torch.equal(model[0].running_mean, torch.full((2,), 7.0))


def test_constants_are_made_anew_on_a_cpu() -> None:
    like = torch.ones(3)
    first = constant(2.0, like, shape=(2,), dtype=torch.float32)
    assert torch.equal(first, torch.full((2,), 2.0)) and first is not constant(2.0, like, shape=(2,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_constants_are_kept_on_a_gpu() -> None:
    like = torch.ones(3, device="cuda")
    assert constant(2.0, like) is constant(2.0, like)
    assert constant(2.0, like).dtype == torch.float64
