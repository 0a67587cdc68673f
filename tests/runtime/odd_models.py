"""Unusual models: modules used twice, tensors in lists, frozen norms, parametrized weights."""

from __future__ import annotations

import random
import warnings
from typing import Any
from unittest import mock

import small_jobs
import torch
import torch.nn.functional as F
from torch import nn

from drumline.plans import Plan
from drumline.runtime.verification.verify import verify


class _Base(nn.Module):
    """A block and a head; `more` adds the odd part."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = small_jobs.Residual(6), nn.Linear(6, 3)
        self.more()

    def more(self) -> None:
        """Nothing odd."""

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        """Runs before the block."""
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.block(self.odd(x)))


class Twice(_Base):
    """One block is run twice."""

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(x))


class Scalar(_Base):
    """A parameter that is a single number."""

    def more(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.7))

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Lists(_Base):
    """Tensors in a list and in a mapping, that are no buffers."""

    def more(self) -> None:
        self.masks, self.named = [torch.rand(6), torch.rand(6)], {"a": (torch.rand(6), 3)}

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.masks[0].to(x) + self.masks[1].to(x) * self.named["a"][0].to(x)


class Reads(_Base):
    """The constructor reads values, so the model cannot be built on the meta device."""

    def more(self) -> None:
        self.rates = [r.item() for r in torch.linspace(0.1, 1, 3)]

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rates[1]


class Norm1d(_Base):
    """BatchNorm over vectors, without running statistics."""

    def more(self) -> None:
        self.norm, self.other = nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(2)

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.norm(x).view(-1, 2, 3)).flatten(1)


class FrozenNorm(_Base):
    """A BatchNorm that stays in evaluation, in a block, and a frozen block."""

    class Block(nn.Module):
        """The recomputed function."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x))

    def more(self) -> None:
        self.normed, self.frozen = FrozenNorm.Block(), small_jobs.Residual(6)
        self.normed.norm.running_mean = torch.rand(6)
        self.normed.norm.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.normed.norm.eval()
        return self

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.normed(x))


class Pair(_Base):
    """Two outputs, one of which the loss does not read."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x.mean()


class Listed(_Base):
    """A list of parameters and a parametrized weight."""

    def more(self) -> None:
        self.numbers = nn.ParameterList([nn.Parameter(torch.full((6,), 0.3)), nn.Parameter(torch.full((6,), 0.1))])
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x * self.numbers[0] + self.numbers[1])


class Counting(_Base):
    """A block with buffers that its forward moves: a spectral norm's vectors, a counter, a running mean."""

    class Block(nn.Module):
        """Computing it twice must not move them twice."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
            self.norm = nn.BatchNorm1d(6, momentum=None)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.calls: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.norm(self.linear(x)) / self.calls

    def more(self) -> None:
        self.counting = Counting.Block()

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return self.counting(x)


class Encoder(_Base):
    """torch's own transformer layer: the true gradient of its key's bias is zero, and Adam steps by its rounding."""

    def more(self) -> None:
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(torch.stack([x, x.flip(1)], 1)).mean(1)
        return y


class Product(_Base):
    """Two inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return super().forward(x * y)


class _Pairs(small_jobs.Samples):
    def __getitem__(self, i: int) -> Any:
        x, label = super().__getitem__(i)
        return (x, x.flip(0) + 1), label


class Noisy(small_jobs.Samples):
    """Random augmentation in every sample."""

    def __getitem__(self, i: int) -> Any:
        x, label = super().__getitem__(i)
        return x + 0.1 * torch.randn(x.shape) + random.random(), label


def run_augmented(plan: str) -> Any:
    """On every rank: the verification of a job whose samples draw random numbers."""
    return verify(small_jobs.make("mlp", data=lambda: Noisy("vector")), Plan.parse(plan), steps=3)


def run_head_only(plan: str) -> Any:
    """On every rank: the verification of a job whose optimizer has some of the parameters; the clip counts all."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[-2:], lr=0.1)

    return verify(small_jobs.make("mlp", optimizer=optimizer, clip=0.1), Plan.parse(plan), steps=3)


def pair_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of the first output alone."""
    return F.cross_entropy(output[0], target)


_CHANGES: dict[type[nn.Module], dict[str, Any]] = {
    Pair: {"loss": pair_loss},
    Product: {"data": lambda: _Pairs("vector")},
}
ODD = (Twice, Lists, Reads, Norm1d, FrozenNorm, Pair, Listed, Counting, Encoder, Product)


def run(model: type[nn.Module], plan: str) -> tuple[Any, list[str]]:
    """On every rank: the verification, and the warnings."""
    job = small_jobs.make("mlp", model=model, clip=None, **_CHANGES.get(model, {}))
    with warnings.catch_warnings(record=True) as messages, mock.patch("drumline.tracing.layers.LEAST_UNIT", 40):
        warnings.simplefilter("always")
        result = verify(job, Plan.parse(plan), steps=3)
    return result, [str(w.message) for w in messages]
