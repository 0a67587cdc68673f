"""The seam below a torch process group in Python: what moves contiguous tensors between its ranks (`shm`, `mpi`)."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ...core.errors import InputError
from ..calls import Signature, Site, digest


class Message(Protocol):
    """A message of an engine, out or in."""

    source: int
    """Whom it came from."""

    def test(self) -> bool:
        """Whether it is done; moves what can be moved."""

    def wait(self, timeout: float | None) -> None:
        """Block until it is."""


class Engine(ABC):
    """What moves contiguous CPU tensors between the ranks of a group. All ranks call the same, in the same order."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str, call: Signature, *, root: int = -1) -> None:
        """In place, on all ranks, or on `root` alone."""

    @abstractmethod
    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: Signature) -> None:
        """`out` becomes block `rank` of the reduction of everybody's blocks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, call: Signature) -> None:
        """Everybody ends with what the root has."""

    @abstractmethod
    def all_gather(self, mine: Tensor, outs: Sequence[Tensor], call: Signature) -> None:
        """`outs[s]` becomes what rank s gave; all have the same size."""

    @abstractmethod
    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: Signature) -> None:
        """`out[s]` goes to rank s, `into[s]` comes from it; None is nothing."""

    @abstractmethod
    def barrier(self, call: Signature, timeout: float | None = None) -> None:
        """Return when all ranks have come; within so many seconds, or the group's own."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        """Start a message; it is done when the tensor may be used again."""

    @abstractmethod
    def receive(self, tensor: Tensor, src: int, tag: int) -> Message:
        """Start to receive, from anybody if `src` is -1."""

    @abstractmethod
    def at_site(self, site: Site) -> None:
        """Told before each call: the line of the program that made it."""

    def refuse(self, what: str) -> None:
        """Tell the others that this rank's call was refused here, so that they do not wait for it."""
        text = f"refused: {what}"
        with contextlib.suppress(InputError):  # this rank's own error says more
            self.barrier(Signature(text, digest(text)))

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""
