"""The seam between the engine and the ways of holding a model on many ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..recording.recorder import Recorder
from .pieces import Piece


class Strategy(ABC):
    """How the data-parallel ranks hold one model.

    A step is: `accumulate` around every micro-batch; `gather_gradients`, after which `piece.value.grad` of every piece
    is complete; the optimizer; `updated`. The ranks' gradients are added up, and divided by `divides`.
    """

    divides: int = 1
    """By what the sum of the ranks' gradients is divided."""
    group: dist.ProcessGroup | None = None
    """The ranks over which the pieces of a parameter lie; None where every rank holds all of them."""
    record: Recorder | None = None
    """Is told of the strategy's messages."""

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """What this rank holds, in the order of the model's parameters; also of those that are frozen."""

    @abstractmethod
    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-batch."""

    def unseen(self) -> int:
        """How many trained parameters this rank's backward did not reach, where the strategy must know."""
        return 0

    @abstractmethod
    def gather_gradients(self) -> None:
        """Give every piece's value its gradient; zeros, or None, where no rank has one."""

    def drop_unseen(self) -> None:  # noqa: B027  # most strategies have nothing to do
        """Some rank has missed some parameters: those that every rank has missed get None for a gradient."""

    @abstractmethod
    def updated(self) -> None:
        """The optimizer has run: forget the gradients and make the model whole again."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the gradients without an update."""

    def buffers(self) -> list[torch.Tensor]:
        """What the strategy keeps between steps beside the pieces."""
        return []

    def add_up(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of a number that was computed from what each holds of the gradients."""
        if self.group is not None and dist.get_world_size(self.group) > 1:
            with self.record.message("all_reduce", value) if self.record else nullcontext():
                dist.all_reduce(value, group=self.group)
        return value

    def tell(self, name: str, work: Any, tensor: torch.Tensor) -> Any:
        """A message has been sent: the recorder follows it. Gives back what is to be waited for."""
        return work if self.record is None else self.record.follow(name, work, tensor)
