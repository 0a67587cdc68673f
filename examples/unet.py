"""A small U-Net with BatchNorm that finds the outlines of discs in noise. Images may be cut into tiles, one per rank.

    drumline verify examples/unet.py --plan tile=2x1 --steps 2

    passed: dp=1,tile=2x1 computes what one device computes

The first losses: 0.769, 0.723, 0.715
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl

SIDE = 24


class Double(nn.Sequential):
    """Two convolutions with BatchNorm."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Down twice, up twice, with skip connections between equal sizes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.bottom = Double(1, width), Double(width, 2 * width), Double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.right2, self.right1 = Double(4 * width, 2 * width), Double(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.right2(torch.cat((self.up2(c), b), 1))
        a = self.right1(torch.cat((self.up1(b), a), 1))
        return self.head(a)


class Discs(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of a disc in noise, each with a mask of the disc; the same ones on every rank."""

    def __init__(self, first: int = 0, count: int = 256) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + i)
        y, x, radius = (6 + 12 * torch.rand(3, generator=generator)).tolist()
        rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        mask = ((rows - y) ** 2 + (columns - x) ** 2 < (radius / 3) ** 2).float()[None]
        return mask + 0.7 * torch.randn(1, SIDE, SIDE, generator=generator), mask


def accuracy(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Share of pixels classified correctly."""
    return {"accuracy": ((output > 0) == (target > 0.5)).float().mean()}


def job() -> dl.Job:
    """Trained on batches of 16 images; a mean over pixels, so tiles agree with whole images."""
    return dl.Job(
        model=UNet,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        data=Discs,
        validation=lambda: Discs(first=1000, count=64),
        evaluate=accuracy,
        batch_size=16,
        steps=40,
    )
