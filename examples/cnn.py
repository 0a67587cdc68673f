"""A small convolutional network with BatchNorm, trained on handwritten digits (scikit-learn's, 8 x 8)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class CNN(nn.Module):
    """A stem, three residual blocks, a global pool and a linear head."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(3)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Digits(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """1,797 images of handwritten digits, every fifth reserved for validation."""

    def __init__(self, validation: bool = False) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        chosen = [i for i in range(len(labels)) if (i % 5 == 0) == validation]
        self.images = torch.tensor(images[chosen], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = labels[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.images[i], int(self.labels[i])


def accuracy(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Share of digits classified correctly."""
    return {"accuracy": (output.argmax(-1) == target).float().mean()}


def job() -> dl.Job:
    """Trained on batches of 64 digits; the last batch of an epoch is shorter."""
    return dl.Job(
        model=CNN,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=Digits,
        validation=lambda: Digits(validation=True),
        evaluate=accuracy,
        batch_size=64,
        steps=60,
    )
