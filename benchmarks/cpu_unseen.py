"""Three jobs for predictions on a CPU that were not run before the price was finished: how far off a new job is.

Ranks load them by name: `cpu_unseen.py:mixer`. Whoever changes the price after a look at them writes others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cpu_jobs import Samples, job_of
from torch import nn

from drumline.job import Job

NAMES = ("both_ways", "apart", "mixer")


class BothWays(nn.Module):
    """An LSTM that reads forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(40, 144, batch_first=True, bidirectional=True), nn.Linear(288, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0].amax(1))


class Apart(nn.Module):
    """A convolution of each channel by itself, and one of all channels at each place, beside a short cut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.point, self.norm = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.hardswish(self.norm(self.point(self.depth(x))))


class Mixed(nn.Module):
    """Linear layers over tokens and over features in turns."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.SiLU(), nn.Linear(2 * tokens, tokens))
        self.over_width = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_width(self.norm2(x))


class Mixer(nn.Module):
    """Three of them; the mean over tokens is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Mixed(72, 224) for _ in range(3))), nn.Linear(224, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean(1))


def _apart() -> nn.Module:
    blocks = [Apart(56) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 56, 4, 4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(56, 11))


def both_ways() -> Job:
    """Series of 28 vectors."""
    return job_of(BothWays, 40, lambda n: Samples(n, (28, 40), 9))


def apart() -> Job:
    """Pictures of 96 x 96."""
    return job_of(_apart, 16, lambda n: Samples(n, (3, 96, 96), 11))


def mixer() -> Job:
    """72 tokens a sample."""
    return job_of(Mixer, 16, lambda n: Samples(n, (72, 224), 15))
