"""The outer optimizer of local SGD (DiLoCo): SGD with Nesterov momentum on the averages of the replicas.

The change from the last result to the new average is a gradient: g = last - average. With momentum m and rate r,

    v <- m v + g        w <- last - r (g + m v)

Every replica computes the same from the same average, so nothing more is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class OuterOptimizer:
    """Nesterov momentum on the weights of all replicas."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, rate: float, momentum: float) -> None:
        self._parameters, self._rate, self._momentum = parameters, rate, momentum
        self._last = {name: p.detach().clone() for name, p in parameters.items()}
        """The last result: where all replicas started from."""
        self.velocities = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Take the weights as they are for the last result, without momentum."""
        for name, p in self._parameters.items():
            self._last[name].copy_(p)
            self.velocities[name].zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Replace the weights, which are the new average, by the result."""
        for name, p in self._parameters.items():
            last, velocity = self._last[name], self.velocities[name]
            gradient = last - p
            velocity.mul_(self._momentum).add_(gradient)
            last.sub_(gradient.add_(velocity, alpha=self._momentum), alpha=self._rate)
            p.copy_(last)
