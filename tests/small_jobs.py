"""Small jobs with difficult properties: batch sizes without common divisors, ragged last batches, every kind of layer that
has broken a parallel runtime. Ranks build them by name, because functions defined in a test cannot be pickled.
"""

from __future__ import annotations

from typing import Any

import hf_jobs
import split_models
import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl

SAMPLES, BATCH = 17, 7
"""Batches of 7, 7 and 3: with three micro-batches on four ranks some ranks have no sample."""


class Residual(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class MLP(nn.Module):
    """Two residual blocks."""

    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(width, dropout) for _ in range(2)))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class ConvBlock(nn.Module):
    """A residual block of convolutions with a BatchNorm and a GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.norm2(self.conv2(torch.tanh(self.norm1(self.conv1(x))))))


class CNN(nn.Module):
    """Two such blocks between a stem and a head; the first norm has no affine part and a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False, momentum=None)
        self.blocks = nn.Sequential(ConvBlock(), ConvBlock())
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.norm(self.stem(x))).mean((2, 3)))


class Attention(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.dropout = Residual(width), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        return self.mlp(x + F.dropout(self.out(y), self.dropout, self.training))


class GPT(nn.Module):
    """Tokens in, logits out; the embedding and the head share their weight. Positions are a plain attribute."""

    def __init__(self, width: int = 8, words: int = 11, length: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.positions = torch.arange(length)
        self.blocks = nn.ModuleList(Attention(width, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(self.positions.to(tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """An LSTM of two layers and a head; the LSTM is inside a block, so that there is something to recompute."""

    class Block(nn.Module):
        """The last output of an LSTM, through a norm."""

        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.norm = nn.LSTM(3, 5, num_layers=2, batch_first=True), nn.LayerNorm(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.lstm(x)[0][:, -1])

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Recurrent.Block(), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Doubled(nn.Module):
    """Two convolutions, each with a norm: over the batch, and over groups of channels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(2, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm2(self.conv2(torch.tanh(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Down twice, up twice by transposed convolutions; with skip connections between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Doubled(1, 2), Doubled(2, 4)])
        self.bottom = Doubled(4, 4)
        self.widen = nn.ModuleList([nn.ConvTranspose2d(4, 4, 2, stride=2), nn.ConvTranspose2d(4, 2, 2, stride=2)])
        self.up = nn.ModuleList([Doubled(8, 4), Doubled(4, 2)])
        self.head = nn.Conv2d(2, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for block in self.down:
            x = block(x)
            seen.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.bottom(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([seen.pop(), widen(x)], 1))
        return self.head(x)


class Partial(nn.Module):
    """A frozen first layer, a layer that forward never reads, and a bare parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.block, self.head = Residual(6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(torch.tanh(self.frozen(x)) * self.scale))


class Named(nn.Module):
    """Inputs by name, one of them optional; a dict comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(5, 6), Residual(6), nn.Linear(6, 3)

    def forward(self, *, x: torch.Tensor, word: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = self.block(x + self.words(word))
        return {"logits": self.head(hidden if mask is None else hidden * mask[:, None])}


class Samples(torch.utils.data.Dataset[Any]):
    """Samples of one kind, the same on every rank."""

    def __init__(self, kind: str, n: int = SAMPLES) -> None:
        g = torch.Generator().manual_seed(5)
        self.kind, self.n = kind, n
        self.x = torch.randn(n, 6, generator=g)
        self.images = torch.randn(n, 1, 5, 4, generator=g) + 1.0
        self.tokens = torch.randint(11, (n, 6), generator=g)
        self.series = torch.randn(n, 4, 3, generator=g)
        self.label = torch.randint(3, (n,), generator=g)
        self.mask = torch.randint(2, (n,), generator=g).float() + 0.5
        counted = torch.rand(n, 5, generator=g) < 0.5
        counted[::4] = False  # whole samples without any counted position
        self.masked = torch.where(counted, self.tokens[:, 1:], -100)
        self.pictures = torch.randn(n, 1, 8, 8, generator=g) + 0.5
        self.areas = torch.randint(3, (n, 8, 8), generator=g)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.n:
            raise IndexError(i)
        label = int(self.label[i])
        return {
            "vector": lambda: (self.x[i], label),
            "image": lambda: (self.images[i], label),
            "tokens": lambda: (self.tokens[i, :-1], self.tokens[i, 1:]),
            "masked": lambda: (self.tokens[i, :-1], self.masked[i]),
            "series": lambda: (self.series[i], label),
            "areas": lambda: (self.pictures[i], self.areas[i]),
            "picture": lambda: (self.pictures[i], label),
            "named": lambda: ({"x": self.x[i], "word": self.tokens[i, 0] % 5, "mask": self.mask[i]}, label),
        }[self.kind]()


def tokens_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over all positions; all samples have the same number."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def masked_loss(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, weight) over the positions that are not ignored."""
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return total, (target != -100).sum()


def named_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """The loss of a model whose output is a mapping."""
    return F.cross_entropy(output["logits"], target)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with a learning rate that shows within a few steps."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Halve the learning rate each step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


_HF: dict[str, Any] = {"data": lambda: hf_jobs.Sentences(SAMPLES), "loss": hf_jobs.loss}
_JOBS: dict[str, dict[str, Any]] = {
    "mlp": {"model": MLP, "optimizer": adam, "clip": 0.5},
    "cnn": {"model": CNN, "kind": "image", "optimizer": sgd},
    "gpt": {"model": GPT, "kind": "tokens", "loss": tokens_loss, "optimizer": adam, "clip": 0.1, "schedule": decay},
    "lstm": {"model": Recurrent, "kind": "series", "optimizer": sgd, "schedule": decay},
    "unet": {"model": UNet, "kind": "areas", "optimizer": sgd, "clip": 1.0},
    "bert": {"model": hf_jobs.bert, **_HF, "optimizer": adam},
    "llama": {"model": hf_jobs.llama, **_HF, "optimizer": adam, "clip": 0.5},
    "partial": {"model": Partial, "optimizer": adam},
    "named": {"model": Named, "kind": "named", "loss": named_loss, "optimizer": adam},
    "masked": {"model": GPT, "kind": "masked", "loss": masked_loss, "optimizer": sgd, "clip": 0.5},
    "dropout": {"model": lambda: GPT(dropout=0.4), "kind": "tokens", "loss": tokens_loss, "optimizer": sgd},
}
JOBS = tuple(_JOBS)
_JOBS |= {
    "t5": {"model": hf_jobs.t5, **_HF, "data": lambda: hf_jobs.Pairs(SAMPLES), "optimizer": adam, "clip": 0.5},
    "keys": {"model": lambda: hf_jobs.llama(4, 2), **_HF, "optimizer": sgd},
    "resnet": {"model": split_models.ResNet, "kind": "picture", "optimizer": sgd, "clip": 1.0},
    "convnet": {"model": split_models.ConvNet, "kind": "picture", "optimizer": sgd},
    "groups": {"model": split_models.GroupUNet, "kind": "areas", "optimizer": adam, "schedule": decay},
    "huge": {"model": split_models.Huge, "optimizer": adam, "clip": 0.5},
    "mixture": {"model": split_models.Mixture, "optimizer": sgd},
}
TOKENS = ("gpt", "llama", "keys", "bert", "t5", "masked", "dropout")
IMAGES = ("unet", "groups", "resnet", "convnet")
FLAT = ("huge",)
"""Jobs without nested modules: nothing to recompute."""
SPLIT_JOBS = (*TOKENS, *IMAGES, "mlp", "huge", "mixture", "named", "partial")
"""Jobs tested under plans that split the model; jobs with tokens and jobs with images have mesh axes of their own."""
HF = ("bert", "llama", "t5", "keys")
"""Jobs of another library, which may not be installed."""


def missing(name: str) -> str:
    """Return why a job cannot run here; empty if it can."""
    return hf_jobs.missing() if name in HF else ""


def make(name: str, **changes: Any) -> dl.Job:
    """Build a job by name, with some of its values changed."""
    values = {"kind": "vector", "loss": F.cross_entropy, "batch_size": BATCH, "seed": 3, **_JOBS[name], **changes}
    kind = values.pop("kind")
    return dl.Job(**{"data": lambda: Samples(kind), **values})
