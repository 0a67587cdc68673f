"""The interface below the communicator: tensors between ranks by rank and tag, without blocking; and sub-groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

FINGERPRINT_BYTES = 16
"""Bytes that ranks compare before a collective: a hash of the call and a hash of its call site."""


class PendingMessage(Protocol):
    """A send or receive in progress."""

    def wait(self) -> None:
        """Return when the tensor may be used again; raise GaveUp if the peer failed."""


class StagedReceive:
    """A receive into host memory, copied to the device at the wait."""

    def __init__(self, pending: PendingMessage, host: Tensor, tensor: Tensor) -> None:
        self._pending, self._host, self._tensor = pending, host, tensor

    def wait(self) -> None:
        """Block until it is received, then copy."""
        self._pending.wait()
        self._tensor.copy_(self._host)


class NativeCollective(Protocol):
    """A collective that the transport implements itself instead of running a schedule."""

    def __call__(self, source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
        """Run on flat, contiguous tensors; return False, with nothing sent, if operator or type are not supported.

        `source` is this rank's input, `target` its output; None where a rank has none. For all_reduce and broadcast
        both are the same tensor. The answer depends on operator, type and device alone, so it is the same on all
        ranks. `op` is a name of `operators.OPERATORS`, "" for collectives that do not reduce.
        """


class Transport(ABC):
    """A group of ranks that send each other tensors. Messages of one (src, dst, tag) keep their order."""

    name = ""
    """The name in tables of measured times, such as `gloo`."""
    contexts = 0
    """The highest number of a sub-group made over this transport."""
    per_node: int | None = None
    """Ranks per host if all hosts have equally many, numbered consecutively; None if unknown."""
    current_call: object = None
    """The call that this rank is in, with its call site: set by the communicator, printed when a wait fails."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        """Start to send a contiguous tensor, possibly empty; it must not change before the wait."""

    @abstractmethod
    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        """Start to fill a contiguous tensor of the size and type that `src` sends."""

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> tuple[list[PendingMessage], list[PendingMessage]]:
        """Start all messages of one round: (receives, sends) in progress. Receives first: some sends wait for them."""
        incoming = [self.receive(tensor, src, tag) for tensor, src in receives]
        return incoming, [self.send(tensor, dst, tag) for tensor, dst in sends]

    def native(self, collective: str) -> NativeCollective | None:
        """The transport's own implementation of a collective, if it has one."""
        return None

    def agree(self, word: bytes) -> list[bytes] | None:
        """All-gather FINGERPRINT_BYTES bytes; None if the transport has nothing faster than messages.

        All ranks call it in the same order. It waits for all of them.
        """
        return None


class SubgroupTransport(Transport):
    """Ranks `members` of `parent`, renumbered in that order. Made by `Communicator.split`."""

    def __init__(self, parent: Transport, members: tuple[int, ...]) -> None:
        self._parent, self._members = parent, members
        self._rank = members.index(parent.rank)
        self.name = parent.name
        self.per_node = _subgroup_per_node(members, parent.per_node)

    @property
    def rank(self) -> int:
        """This rank's number in the sub-group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self._members)

    @property
    def current_call(self) -> object:
        """The call that this rank is in; stored by the parent, which does the waiting."""
        return self._parent.current_call

    @current_call.setter
    def current_call(self, call: object) -> None:
        self._parent.current_call = call

    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        """Send through the parent."""
        return self._parent.send(tensor, self._members[dst], tag)

    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        """Receive through the parent."""
        return self._parent.receive(tensor, self._members[src], tag)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> tuple[list[PendingMessage], list[PendingMessage]]:
        """Exchange through the parent."""
        members = self._members
        return self._parent.exchange([(t, members[r]) for t, r in sends], [(t, members[r]) for t, r in receives], tag)


def _subgroup_per_node(members: tuple[int, ...], per_node: int | None) -> int | None:
    """Ranks per host of a sub-group if its hosts are equally large and consecutive as well."""
    if per_node is None:
        return None
    hosts = [rank // per_node for rank in members]
    n = hosts.count(hosts[0])
    blocks = [hosts[i : i + n] for i in range(0, len(hosts), n)]
    uniform = all(len(set(block)) == 1 and len(block) == n for block in blocks)
    return n if uniform and len({block[0] for block in blocks}) == len(blocks) else None
