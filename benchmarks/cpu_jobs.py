"""Six small jobs of different kinds, for predictions on a CPU: each step takes some 50 to 500 ms on two cores.

Ranks load them by name: `cpu_jobs.py:gpt`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpt_task import GPT, Size, Tokens, loss_of
from torch import nn

from drumline.core.job import Job

NAMES = ("gpt", "cnn", "mlp", "unet", "lstm", "moe")
KEPT = 4
"""Batches of samples that a dataset has; they are used again and again."""


class Samples(torch.utils.data.Dataset[Any]):
    """Random inputs of one shape with random classes, made once."""

    def __init__(self, n: int, shape: tuple[int, ...], classes: int, of: tuple[int, ...] = ()) -> None:
        g = torch.Generator().manual_seed(1)
        self._x = torch.randn(n, *shape, generator=g)
        self._y = torch.randint(classes, (n, *of), generator=g)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[i], self._y[i]


def job_of(model: Callable[[], nn.Module], batch: int, data: Callable[[int], Any], loss: Any = F.cross_entropy) -> Job:
    adam = partial(torch.optim.AdamW, lr=1e-3)
    return Job(model=model, loss=loss, optimizer=adam, data=partial(data, KEPT * batch), batch_size=batch)


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a residual connection."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class CNN(nn.Module):
    """Residual blocks on pictures of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Residual(3, 32, 1), Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def _doubled(channels: int, out: int) -> nn.Sequential:
    first, second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(4, out), nn.SiLU(), second, nn.GroupNorm(4, out), nn.SiLU())


class UNet(nn.Module):
    """Down twice, up twice; what was seen on the way down skips to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_doubled(1, 16), _doubled(16, 32)])
        self.bottom = _doubled(32, 64)
        self.widen = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.up = nn.ModuleList([_doubled(64, 32), _doubled(32, 16)])
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for block in self.down:
            x = block(x)
            seen.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([seen.pop(), widen(x)], 1))
        return self.head(x)


class Recurrent(nn.Module):
    """Two layers of an LSTM; the last output is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 256, num_layers=2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Mixture(nn.Module):
    """Parallel experts; every token goes to all of them, weighted by a router."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights = torch.softmax(self.router(y), -1)
        return x + torch.stack([weights[..., i, None] * expert(y) for i, expert in enumerate(self.experts)]).sum(0)


class Experts(nn.Module):
    """Two such mixtures; the mean over tokens is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Mixture(256, 512, 4) for _ in range(2))), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean(1))


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 10))


def gpt() -> Job:
    """4 blocks of width 256, 128 tokens."""
    size = Size(context=128, width=256, heads=4, blocks=4)
    return job_of(partial(GPT, size), 8, lambda n: Tokens(n, size.context), loss_of)


def cnn() -> Job:
    """Residual blocks."""
    return job_of(CNN, 32, lambda n: Samples(n, (3, 32, 32), 10))


def mlp() -> Job:
    """One layer is far larger than the others."""
    return job_of(_wide, 128, lambda n: Samples(n, (256,), 10))


def unet() -> Job:
    """Pictures of 64 x 64, a class for each point."""
    return job_of(UNet, 16, lambda n: Samples(n, (1, 64, 64), 4, (64, 64)))


def lstm() -> Job:
    """Series of 32 vectors."""
    return job_of(Recurrent, 32, lambda n: Samples(n, (32, 64), 10))


def moe() -> Job:
    """64 tokens a sample, four experts a layer."""
    return job_of(Experts, 16, lambda n: Samples(n, (64, 256), 10))
