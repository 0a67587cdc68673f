"""A job in which one rank fails in the middle of a step, for tests of what the other ranks say about it."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

import drumline as dl
from drumline.comm.environment import connect
from drumline.comm.rank_status import rank_status

WIDTH, SAMPLES, STEP = 8, 12, 2
"""The fault comes in this step."""


def fail(how: str, bad: int) -> None:
    """Fail, if this is the rank and the step."""
    if int(os.environ["RANK"]) == bad and rank_status().read().step >= STEP:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"a mistake on rank {bad}")


class _Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str, where: str, bad: int) -> torch.Tensor:
        ctx.fault = how, where, bad
        if where == "forward" and not isinstance(x, FakeTensor):
            fail(how, bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        how, where, bad = ctx.fault
        if where == "backward":
            fail(how, bad)
        return gradient, None, None, None


class Layer(nn.Module):
    """Two linear layers and a fault between them."""

    def __init__(self, how: str, where: str, bad: int) -> None:
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), (how, where, bad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Fault.apply(self.up(x), *self.fault)  # type: ignore[no-untyped-call]  # torch's own
        return self.down(F.gelu(x))  # type: ignore[no-any-return]  # torch's own


def model(how: str, where: str, bad: int) -> nn.Module:
    """One layer for each of three ranks."""
    return nn.Sequential(*(Layer(how, where, bad) for _ in range(3)))


def train(plan: str, how: str, where: str, bad: int) -> None:
    """On every rank: train until the fault."""
    draw = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(*(torch.randn(SAMPLES, WIDTH, generator=draw) for _ in range(2)))
    job = dl.Job(
        model=partial(model, how, where, bad),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        data=lambda: data,
        batch_size=SAMPLES,
    )
    engine = dl.initialize(job, plan)
    for batch in engine.data(20):
        engine.step(batch)


def survive_in_backward(backend: str, note: str) -> None:
    """On every rank: rank 1 fails, and the others write what `loss.backward()` raised under plain DDP."""
    rank = connect(backend=backend).rank
    ddp = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    for step in range(3):
        loss = ddp(torch.ones(2, WIDTH)).sum()
        if rank == 1 and step == 1:
            raise ValueError("a mistake on rank 1")
        try:
            loss.backward()
        except RuntimeError as e:
            Path(note).write_text(f"{type(e).__name__}: {e}")
            raise
