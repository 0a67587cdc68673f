"""A layer that sleeps instead of computing, with separate times for its forward and both gradients; counts activations.

It is three functions, because torch decides once for a whole backward which gradients are needed: one that
passes the input through, one that passes the weight through, and their product, which keeps the input.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Sleeps:
    """Seconds of one layer and one micro-batch."""

    forward: float
    input: float
    """For the gradient of the input."""
    weight: float
    """For the gradient of the weight."""


class Sleeper(nn.Module):
    """x -> x * weight, slowly."""

    def __init__(self, width: int, sleeps: Sleeps, *, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.01 * torch.randn(width))
        self.sleeps = sleeps
        # the first layer's input needs no gradient, but all stages should take equal time
        self.for_weight = sleeps.weight + (sleeps.input if first else 0.0)

    def forward(self, x: torch.Tensor) -> Any:
        x = _Through.apply(x, self.sleeps.forward, self.sleeps.input)  # type: ignore[no-untyped-call]  # torch's own
        weight = _Through.apply(self.weight, 0.0, self.for_weight)  # type: ignore[no-untyped-call]  # torch's own
        return _Product.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own


class Counter:
    """Activation bytes of the layers in this process: current and peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, n: int) -> None:
        """Add bytes; a negative number removes them."""
        self.now += n
        self.peak = max(self.peak, self.now)

    def restart(self) -> None:
        """Start a new peak, before a step."""
        self.peak = self.now


activations = Counter()


class _Kept:
    """A tensor that is counted as long as this lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.bytes = 0 if isinstance(tensor, FakeTensor) else tensor.nbytes
        activations.add(self.bytes)

    def __del__(self) -> None:
        activations.add(-self.bytes)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        if not isinstance(x, FakeTensor):
            time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.kept, ctx.weight = _Kept(x), weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.weight, (gradient * ctx.kept.tensor).sum(0)
