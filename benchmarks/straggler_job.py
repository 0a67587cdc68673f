"""A real small task on a device that sleeps: handwritten digits, by a network that takes a given time per sample.

The variable STRAGGLER (`3:4`) makes the layers of rank 3 four times as slow. Four ranks then behave like four devices,
however few cores there are, while losses and gradients are real.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import drumline as dl

BATCH, STEPS = 64, 400
SECONDS = 0.001
"""Of forward and backward, per sample."""


class _Nap(torch.autograd.Function):
    """An identity that sleeps a third of the time in the forward and two thirds in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        if not isinstance(x, FakeTensor):
            time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds / 3)
        return gradient, None


class Digits(nn.Module):
    """Two layers, and a sleep in proportion to the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.hidden(x))
        nap: torch.Tensor = _Nap.apply(hidden, len(x) * seconds_per_sample())  # type: ignore[no-untyped-call]
        logits: torch.Tensor = self.head(nap)
        return logits


def seconds_per_sample() -> float:
    """Return the sleep per sample of this rank."""
    rank, _, factor = os.environ.get("STRAGGLER", "").partition(":")
    return SECONDS * (float(factor) if rank and rank == os.environ.get("RANK") else 1.0)


def digits() -> torch.utils.data.Dataset[Any]:
    """Load 1,797 images of 8 x 8 pixels."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.utils.data.TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))


def job() -> dl.Job:
    """Build the job."""
    return dl.Job(
        model=Digits,
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        data=digits,
        batch_size=BATCH,
        steps=STEPS,
    )
