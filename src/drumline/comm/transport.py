"""The seam below the communicator: tensors between ranks, by number and tag, without waiting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """A send or a receive under way."""

    def wait(self) -> None:
        """Return when the tensor may be used again; raise GaveUp when the other end failed."""


class Transport(ABC):
    """A group of ranks that can send each other tensors. Messages of one (src, dst, tag) keep their order."""

    contexts = 0
    """The highest number of a sub-group that was made over this transport."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Start to send a contiguous tensor, which may be empty; it must not change before the wait."""

    @abstractmethod
    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Start to fill a contiguous tensor of the size and type that `src` sends."""
