"""Training task of several benchmarks: a small GPT of any size, and sequences that it can learn.

Queries, keys and values have separate layers, as in code that is split by hand; the number of heads follows from the
width of the projections, so that the same code runs on a shard of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "fused": True}
VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """The numbers of a model."""

    context: int
    width: int
    heads: int
    blocks: int


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.q, self.k, self.v, self.out = (nn.Linear(size.width, size.width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head).transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a norm before it and a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(size.width), nn.LayerNorm(size.width), Attention(size)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """No dropout, so that all contestants compute the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tokens(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A sequence that a model can learn: every token follows from the one before, with some noise."""

    def __init__(self, samples: int, context: int) -> None:
        draw = torch.Generator().manual_seed(1)
        noise = torch.randint(0, 4, (samples, context + 1), generator=draw)
        start = torch.randint(0, VOCABULARY, (samples, 1), generator=draw)
        self.text = (start + (3 + noise).cumsum(1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.text[i, :-1], self.text[i, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
