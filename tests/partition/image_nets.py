"""Small image models, each with something hard to partition: skips, strides, uneven sizes, statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

T = torch.Tensor
CLASSES = 4


def _double(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1),
        nn.GroupNorm(2, b),
        nn.ReLU(inplace=True),
        nn.Conv2d(b, b, 3, padding=1),
        nn.GroupNorm(2, b),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Down by pooling and by a strided convolution, up by a transposed one and by interpolation, skips by `cat`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = _double(3, 8), _double(8, 8), _double(8, 16)
        self.down = nn.Conv2d(8, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.back, self.last = _double(16, 8), _double(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: T) -> T:
        a = self.one(x)
        b = self.two(F.max_pool2d(a, 2))
        c = self.up(self.three(self.down(b)))
        c = F.pad(c, (0, b.shape[3] - c.shape[3], 0, b.shape[2] - c.shape[2]))
        d = self.back(torch.cat([b, c], 1))
        e = F.interpolate(d, size=a.shape[2:], mode="bilinear", align_corners=False)
        return self.head(self.last(torch.cat([a, e], 1)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if stride > 1 else None

    def forward(self, x: T) -> T:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        y += x if self.short is None else self.short(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """A stem of stride 4, blocks of two widths, the global average, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(_Block(8, 8, 1), _Block(8, 16, 2), _Block(16, 16, 1))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: T) -> T:
        y = F.max_pool2d(F.relu(self.bn(self.stem(x))), 3, 2, 1)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.blocks(y), 1), 1))  # type: ignore[no-any-return]


def convnet() -> nn.Module:
    """Convolution, BatchNorm, average pool, and one averaged map per class."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AvgPool2d(3, 2, 1),
        nn.Conv2d(8, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, CLASSES, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def separable() -> nn.Module:
    """Depthwise and pointwise convolutions, reflected borders."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, 2, 1, groups=8),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU6(),
        nn.Conv2d(8, 12, 1),
        nn.Hardswish(),
        nn.Conv2d(12, 12, 5, padding="same", groups=12),
        nn.GroupNorm(3, 12),
        nn.Conv2d(12, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def vgg() -> nn.Module:
    """Adaptive pooling, then `flatten` and linear layers over channels and positions together."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.Flatten(),
        nn.Linear(48, 10),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(10, CLASSES),
    )


class Segments(nn.Module):
    """Dilated branches, a branch with the global average, pixel shuffling, bilinear interpolation to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.branches = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=r, dilation=r) for r in (1, 2, 4))
        self.whole = nn.Conv2d(8, 4, 1)
        self.norm = nn.BatchNorm2d(12)
        self.head = nn.Conv2d(16, 4 * CLASSES, 1)

    def forward(self, x: T) -> T:
        y = F.relu(self.stem(x))
        mean = self.whole(y.mean((2, 3), keepdim=True)).expand(-1, -1, *y.shape[2:])
        y = F.relu(self.norm(torch.cat([branch(y) for branch in self.branches], 1)))
        y = F.pixel_shuffle(self.head(torch.cat([y, mean], 1)), 2)
        return F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=True)


MODELS: dict[str, Any] = {
    "unet": UNet,
    "resnet": ResNet,
    "convnet": convnet,
    "separable": separable,
    "vgg": vgg,
    "segments": Segments,
}
PIXELS = ("unet", "segments")
"""Models with a class for every pixel."""
