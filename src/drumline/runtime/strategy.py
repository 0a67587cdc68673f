"""The seam between the engine and the ways of holding a model on many ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import nn


class Strategy(ABC):
    """How the data-parallel ranks hold one model."""

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call; its parameters are what the optimizer gets."""

    @abstractmethod
    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-batch; gradients must be complete after the last."""

    @abstractmethod
    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a parameter or of a gradient: it shares its memory."""

    @abstractmethod
    def add_up(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of a number that was computed from what each holds of the gradients."""

    @abstractmethod
    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, of a gradient, or of what was computed from them, on every rank."""
