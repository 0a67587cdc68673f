"""A job small enough that its checkpoint fits among the tests: two layers on points of a circle."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl


class Circle(torch.utils.data.Dataset):
    """64 points; the label says whether one lies in the upper half."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        angle = 2 * math.pi * i / 64
        return torch.tensor([math.cos(angle), math.sin(angle)]), int(angle < math.pi)


def job() -> dl.Job:
    """What the command trains."""
    return dl.Job(
        model=lambda: nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=Circle,
        batch_size=16,
        schedule=dl.rates.Cosine(steps=12, warmup=2, end=0.1),
        steps=12,
    )
