"""Three jobs for predictions on a CPU that were never run before the cost model was finished: the error for new jobs.

Ranks load them by name: `cpu_unseen.py:hourglass`. If the cost model is changed after a look at
them, new jobs replace them.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from cpu_jobs import Samples, job_of
from torch import nn

from drumline.core.job import Job

NAMES = ("hourglass", "cross", "members")


class Hourglass(nn.Module):
    """Down by strides, up by interpolation; the classes are predicted at each fourth pixel."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 20, 40, 80)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.up, self.head = nn.Conv2d(80, 40, 3, padding=1), nn.Conv2d(40, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for filters, norm in zip(self.down, self.norms, strict=True):
            x = F.gelu(norm(filters(x)))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(F.gelu(self.up(x)))


class Cross(nn.Module):
    """Learned queries attend to the vectors of a sample, several times."""

    def __init__(self, width: int, heads: int, asked: int) -> None:
        super().__init__()
        self.vectors, self.heads = nn.Parameter(torch.randn(asked, width)), heads
        self.key_value, self.query = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.vectors.expand(len(x), -1, -1)
        k, v = (self._split(t) for t in self.key_value(x).chunk(2, -1))
        for _ in range(3):
            a = F.scaled_dot_product_attention(self._split(self.query(self.norm(y))), k, v)
            y = y + a.transpose(1, 2).flatten(2)
            y = y + self.down(F.relu(self.up(y)))
        return self.head(y.mean(1))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Members(nn.Module):
    """An ensemble of five plain networks; their outputs are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(
                nn.Linear(350, 640),
                nn.Sigmoid(),
                nn.Dropout(0.1),
                nn.Linear(640, 450),
                nn.Sigmoid(),
                nn.Linear(450, 22),
            )
            for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([net(x) for net in self.nets]).mean(0)


def hourglass() -> Job:
    """Pictures of 96 x 96."""
    return job_of(Hourglass, 12, lambda n: Samples(n, (3, 96, 96), 6, (24, 24)))


def cross() -> Job:
    """90 vectors a sample, 48 that ask."""
    return job_of(lambda: Cross(288, 6, 48), 14, lambda n: Samples(n, (90, 288), 25))


def members() -> Job:
    """Vectors of 350 numbers."""
    return job_of(Members, 384, lambda n: Samples(n, (350,), 22))
