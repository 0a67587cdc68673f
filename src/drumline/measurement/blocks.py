"""Blocks of the small steps that are measured in place, on CPUs and GPUs: of a transformer, residual, recurrent."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..core.job import Job


class Attention(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, width)
        x = x + self.out(y)
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a short cut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Recurrent(nn.Module):
    """An LSTM of some layers, whose samples are the first dim."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)[0]
        return out


def steps_of(block: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, blocks: int) -> Job:
    """A job of some blocks, one after the other, that is to give back what it is given."""
    return Job(
        model=lambda: nn.Sequential(*(block() for _ in range(blocks))),
        loss=lambda output, target: (output.float() - target).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: [(torch.zeros(shape), torch.zeros(shape))] * 4,
        batch_size=batch,
    )
