"""A mixture of experts: each token is computed by two of four small networks, which may live on different ranks.

    drumline verify examples/experts.py --plan dp=2,ep=2 --steps 2

    passed: dp=2,ep=2 computes what one device computes

The first losses: 3.536, 3.456, 3.364
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl

WIDTH, EXPERTS, LENGTH, SYMBOLS = 32, 4, 16, 32


def expert() -> nn.Module:
    """One expert: a perceptron."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))


class Mixture(nn.Module):
    """A router that chooses two experts for each token, and weighs their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = dl.Experts(expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weight, index = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, index, weight).view_as(x)


class Model(nn.Module):
    """Symbols in; two mixtures around a running mean over the past; a distribution over the next symbol out."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, WIDTH)
        self.first, self.second = Mixture(), Mixture()
        self.head = nn.Linear(2 * WIDTH, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.first(self.symbol(symbols))
        count = torch.arange(1, symbols.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        past = x.cumsum(1) / count
        return self.head(torch.cat((self.second(x), past), -1))


class Counting(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences that go up by a constant: the next symbol follows from the last two."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        sequence = (i + (1 + i % 3) * torch.arange(LENGTH + 1)) % SYMBOLS
        return sequence[:-1], sequence[1:]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def job() -> dl.Job:
    """Trained on batches of 32 sequences."""
    return dl.Job(
        model=Model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        data=Counting,
        batch_size=32,
        steps=60,
    )
