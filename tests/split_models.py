"""Models for plans that split the model itself: images with each kind of norm, a huge layer, and a mixture whose every
expert sees every token, so that its operators do not depend on values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two convolutions with BatchNorm and a residual connection; the first may have a stride."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))
        return F.silu(y + (x if self.short is None else self.short(x)))


class ResNet(nn.Module):
    """A stem with a pool, two blocks, the global average, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 8, 2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(F.max_pool2d(F.silu(self.norm(self.stem(x))), 3, 2, 1))
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm in a row, one of them dilated; the mean of a map for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 5, padding=2),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(4, 6, 3, padding=2, dilation=2),
            nn.BatchNorm2d(6),
            nn.Tanh(),
        )
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).mean((2, 3))


def grouped(channels: int, out: int) -> nn.Sequential:
    """Two convolutions with GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1),
        nn.GroupNorm(2, out),
        nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1),
        nn.GroupNorm(2, out),
        nn.SiLU(),
    )


class GroupUNet(nn.Module):
    """Down by a pool, up by interpolation; what was seen on the way down skips to the way up. GroupNorm throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom, self.up = grouped(1, 4), grouped(4, 8), grouped(12, 4)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.down(x)
        low = self.bottom(F.max_pool2d(seen, 2))
        wide = F.interpolate(low, size=seen.shape[2:], mode="bilinear", align_corners=False)
        return self.head(self.up(torch.cat([seen, wide], 1)))


class Huge(nn.Module):
    """One layer that is far larger than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.wide, self.narrow = nn.Linear(6, 8), nn.Linear(8, 120), nn.Linear(120, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        return self.head(self.norm(x + self.narrow(F.relu(self.wide(x)))))


class Mixture(nn.Module):
    """A mixture of experts without a choice of tokens: a gate weighs what every expert makes of a token."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.inner, self.gate, self.head = nn.Linear(6, 8), nn.Linear(8, experts), nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        shares = self.gate(x).softmax(-1)
        parts = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head(x + (shares.unsqueeze(-1) * parts).sum(1))
