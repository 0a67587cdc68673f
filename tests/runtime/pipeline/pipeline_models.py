"""Small models that pipelines are tested on, each with the function that gives the sum of its loss and the weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Dropping(Mlp):
    """Layers in a row, with chance between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.5, training=True)
        return x


class Skip(Mlp):
    """The output of the first layer is read again by the last layer and by one between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = torch.tanh(self.layers[0](x))
        for i, layer in enumerate(self.layers[1:]):
            x = torch.tanh(layer(x))
            if i in (3, 6):
                x = x * first + first
        return x


class Two(Mlp):
    """Two values go side by side, and one of them has no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, sign = x, x.flip(-1), (x > 0)
        for left, right in zip(self.layers[::2], self.layers[1::2], strict=True):
            a, b = torch.tanh(left(a) + b), torch.where(sign, right(b), b) * a.detach()
        return a + b


class Twice(Mlp):
    """One layer is used again and again, and its weight is also transposed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(8):
            layer = self.layers[i % 2]
            x = torch.tanh(layer(x)) + F.linear(x, layer.weight.t()) * 0.1
        return x


class Frozen(Mlp):
    """Some parameters are not trained, one is never read, and a region has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[:3]:
            layer.requires_grad_(False)
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * self.scale
            if i in (2, 5):
                with torch.no_grad():
                    x_mean = self.layers[7](x).mean(-1, keepdim=True)
                    x_mean = x_mean * 2
                x = x - x_mean
        return x


class Lm(nn.Module):
    """A small language model whose head is its embedding: attention, norms, a mask and positions made of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1]
        place = torch.arange(n)
        mask = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)
        x = self.embed(ids) + self.place(place)
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.norm(x), self.embed.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.one(x)).view(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, 8))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Conv(nn.Module):
    """Convolutions with batch norms: buffers that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True) + x
        return x.mean((2, 3))


def squares(model: nn.Module, leaves: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error, weighted by the last input."""
    x, y, w = leaves
    return ((model(x) - y).square().sum(-1) * w).sum(), w.sum()


def words(model: nn.Module, leaves: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the next word; some are not counted."""
    ids, labels = leaves
    scores = model(ids).flatten(0, 1)
    return F.cross_entropy(scores, labels.flatten(), ignore_index=-1, reduction="sum"), (labels >= 0).sum()


def vectors(n: int, seed: int) -> list[torch.Tensor]:
    """A micro-batch of n vectors."""
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, 6, generator=g, dtype=torch.float64) for _ in range(2))
    return [x, y, torch.rand(n, generator=g, dtype=torch.float64)]


def sentences(n: int, seed: int) -> list[torch.Tensor]:
    """A micro-batch of n sentences."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (n, 5), generator=g)
    return [ids, torch.where(ids > 3, ids.flip(1), -1)]


def pictures(n: int, seed: int) -> list[torch.Tensor]:
    """A micro-batch of n pictures."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 4, 4, generator=g, dtype=torch.float64)
    return [x, torch.randn(n, 3, generator=g, dtype=torch.float64), torch.rand(n, generator=g, dtype=torch.float64)]


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "mlp": (Mlp, squares, vectors),
    "dropping": (Dropping, squares, vectors),
    "skip": (Skip, squares, vectors),
    "two": (Two, squares, vectors),
    "twice": (Twice, squares, vectors),
    "frozen": (Frozen, squares, vectors),
    "lm": (Lm, words, sentences),
    "conv": (Conv, squares, pictures),
}
"""Name -> (model, its loss, its micro-batches)."""
