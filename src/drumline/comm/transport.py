"""The seam below the communicator: tensors between ranks, by number and tag, without waiting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

WORD = 16
"""Bytes that ranks compare before a collective: the fingerprint of the call and the hash of its call site."""


class Pending(Protocol):
    """A send or a receive under way."""

    def wait(self) -> None:
        """Return when the tensor may be used again; raise GaveUp when the other end failed."""


class Native(Protocol):
    """A collective that a transport brings along, not run from a schedule."""

    def __call__(self, source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
        """Run it on flat, contiguous tensors; False, with nothing sent, when it does not know this operator or type.

        `source` is what this rank gives, `target` where its result goes; None where a rank gives or gets nothing. Of
        all_reduce and broadcast both are the same tensor. The answer depends on operator, type and device alone, so
        that all ranks answer alike. `op` is a name of `ops.OPERATORS`, "" for collectives that do not reduce.
        """


class Transport(ABC):
    """A group of ranks that can send each other tensors. Messages of one (src, dst, tag) keep their order."""

    name = ""
    """What tables of measured times call it, such as `gloo`."""
    contexts = 0
    """The highest number of a sub-group that was made over this transport."""
    per_node: int | None = None
    """Ranks of one host, where hosts have equally many with numbers in a row; None where it is not known."""
    doing: object = None
    """What this rank is about, with its call site: set by the communicator, printed when a wait fails."""

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

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """Start all messages of one round: what is under way in and out. Receives stand first: some wait for them."""
        coming = [self.receive(tensor, src, tag) for tensor, src in receives]
        return coming, [self.send(tensor, dst, tag) for tensor, dst in sends]

    def native(self, collective: str) -> Native | None:
        """The transport's own form of a collective, where it has one."""
        return None

    def agree(self, word: bytes) -> list[bytes] | None:
        """The WORD bytes of every rank, by rank; None where the transport has no quicker way than messages.

        All ranks call it, in the same order. It waits for all of them.
        """
        return None
