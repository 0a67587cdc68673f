"""Models with rare features: complex weights, random numbers in the forward, tensors in lists."""

from __future__ import annotations

from typing import Any

import small_jobs
import torch
from torch import nn

from drumline.plans import Plan
from drumline.runtime.verification.verify import verify


class Spectral(nn.Module):
    """Weights of the frequencies, which are complex numbers; a buffer of complex numbers turns them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(5, 2, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(5), torch.arange(5.0)))
        self.turn: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.rfft(torch.tanh(self.first(x)))
        return self.head(torch.fft.irfft(y * (self.weight.sum(1) * self.turn), n=8))


class Draws(nn.Module):
    """Random draws: noise, diffusion steps, a skipped path, Gumbel sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.steps = nn.Linear(6, 12), nn.Embedding(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.up(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * spread.exp()
        z = z * (1 + torch.rand(z.shape[0], 1, dtype=z.dtype)) + self.steps(torch.randint(0, 10, (z.shape[0],)))
        kept = z.new_empty(z.shape[0], 1).bernoulli_(0.9).div_(0.9)
        return kept * torch.nn.functional.gumbel_softmax(z, tau=0.5)


class Drawing(nn.Module):
    """Such a block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Draws(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


class Single(nn.Module):
    """Computes in float32 for any input, as many norms do, with functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(self.up(x), 0.5, self.training)
        return y.to(torch.float32).exp().log1p().float().to(x.dtype)


class Again(nn.Module):
    """Two such blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Single(), Single()), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class Causal(nn.Module):
    """torch's own encoder with a mask, which it compares with the causal one when it has values."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(2, dtype=x.dtype)
        return self.head(self.encoder(torch.stack([x, x.flip(1)], 1), mask=mask)[:, -1])


class Listed(nn.Module):
    """Tensors in a list and in a mapping that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = small_jobs.Residual(6), nn.Linear(6, 3)
        self.masks, self.named = [torch.rand(6), torch.rand(6)], {"a": (torch.rand(6), 3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x * self.masks[0].to(x) + self.masks[1].to(x) * self.named["a"][0].to(x)))


class Alias(nn.Module):
    """A parameter that is also in a plain list, where it cannot be recognized."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.also = [self.body.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x) @ self.also[0])


def run(model: type[nn.Module], plan: str, steps: int = 3, **changes: Any) -> Any:
    """On every rank: verify a model under a plan."""
    return verify(small_jobs.make("mlp", model=model, **changes), Plan.parse(plan), steps=steps)
