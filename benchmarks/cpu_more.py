"""Four more jobs for predictions on a CPU, of other kinds and widths; the price was looked at with them, too.

Ranks load them by name: `cpu_more.py:gru`.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from cpu_jobs import Samples, job_of
from torch import nn

from drumline.job import Job

NAMES = ("gru", "vgg", "encoder", "autoencoder")


class Gated(nn.Module):
    """One layer of a GRU; the mean over time is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(48, 192, batch_first=True), nn.Linear(192, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0].mean(1))


def _filters(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def _vgg() -> nn.Module:
    blocks = [_filters(3, 24), _filters(24, 48), _filters(48, 96), _filters(96, 96)]
    top = [nn.Linear(96 * 9, 400), nn.ReLU(), nn.Dropout(0.3), nn.Linear(400, 20)]
    return nn.Sequential(*blocks, nn.Flatten(), *top)


class Encoder(nn.Module):
    """torch's own transformer layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 192)
        layer = nn.TransformerEncoderLayer(192, 6, 600, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(192, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x)))


class Words(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random sentences; every word is to be told."""

    def __init__(self, n: int) -> None:
        self._x = torch.randint(2000, (n, 80), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[i], self._x[i]


def _autoencoder() -> nn.Module:
    widths = (900, 700, 300, 60, 300, 700, 900)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.Tanh()]
    return nn.Sequential(*layers[:-2], nn.Linear(900, 25))


def _each_word(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def gru() -> Job:
    """Series of 40 vectors."""
    return job_of(Gated, 24, lambda n: Samples(n, (40, 48), 12))


def vgg() -> Job:
    """Plain convolutions and pooling on pictures of 48 x 48, with dropout."""
    return job_of(_vgg, 24, lambda n: Samples(n, (3, 48, 48), 20))


def encoder() -> Job:
    """Sentences of 80 words."""
    return job_of(Encoder, 12, Words, _each_word)


def autoencoder() -> Job:
    """Linear layers, narrow in the middle."""
    return job_of(_autoencoder, 512, lambda n: Samples(n, (900,), 25))
