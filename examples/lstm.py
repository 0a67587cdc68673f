"""A two-layer LSTM that predicts the next value of sums of two sine waves.

    drumline verify examples/lstm.py --plan dp=2,zero=2 --steps 2

    passed: dp=2,zero=2 computes what one device computes

The first losses: 1.050, 1.037, 0.928
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl

LENGTH, WIDTH = 48, 64


class Forecast(nn.Module):
    """Values in, the next value after each of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class Waves(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sums of two waves with random periods and phases; sample i is the same on every rank."""

    def __init__(self, first: int = 0, count: int = 512) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        periods, phases = torch.rand(2, 2, generator=torch.Generator().manual_seed(self.first + i)).tolist()
        t = torch.arange(LENGTH + 1.0)
        each = [torch.sin(2 * math.pi * (t / (6 + 18 * p) + q)) for p, q in zip(periods, phases, strict=True)]
        wave = sum(each, torch.zeros(LENGTH + 1))[:, None]
        return wave[:-1], wave[1:]


def job() -> dl.Job:
    """Trained on batches of 32 sequences. Gradients of recurrent networks are clipped."""
    return dl.Job(
        model=Forecast,
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        data=Waves,
        validation=lambda: Waves(first=10_000, count=64),
        batch_size=32,
        steps=60,
        clip=1.0,
    )
