"""Pipelines whose layers sleep instead of computing, for tests of what is measured: a sleep takes no core."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.pipeline.clock import LaneTiming

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from sleeping import Sleeper, Sleeps

WIDTH = 8


class Layers(nn.Module):
    """One behind the other; the first has no gradient of its input, and sleeps as long all the same."""

    def __init__(self, seconds: tuple[float, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeper(WIDTH, Sleeps(s, s, s), first=i == 0) for i, s in enumerate(seconds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def job(seconds: tuple[float, ...], samples: int = 4) -> dl.Job:
    """Layers that sleep so long in their forward, for their input and for their weight."""
    draw = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(*(torch.randn(samples, WIDTH, generator=draw) for _ in range(2)))
    return dl.Job(
        model=partial(Layers, seconds),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        data=lambda: data,
        batch_size=samples,
    )


def lanes(seconds: tuple[float, ...], plan: str, steps: int) -> list[LaneTiming]:
    """On every rank: the last two of some steps."""
    return trained(seconds, plan, steps).strategy.lanes(2)


def trained(seconds: tuple[float, ...], plan: str, steps: int) -> Engine:
    """On every rank: an engine after some steps."""
    engine = initialize(job(seconds), plan)
    for batch in engine.data(steps):
        engine.step(batch)
    return engine


def begins(seconds: tuple[float, ...], plans: list[str]) -> list[tuple[str, ...]]:
    """On every rank: where the stages begin under each plan, and that they train."""
    summaries = [trained(seconds, plan, 1).strategy.summary for plan in plans]
    return [summary.stages for summary in summaries if summary is not None]
