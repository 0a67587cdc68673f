"""Some ranks of a transport as a transport of their own; made by `Communicator.split`."""

from __future__ import annotations

from torch import Tensor

from .transport import Pending, Transport


class Group(Transport):
    """Ranks `members` of `parent`, numbered in that order."""

    def __init__(self, parent: Transport, members: tuple[int, ...]) -> None:
        self._parent, self._members = parent, members
        self._rank = members.index(parent.rank)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._members)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Send through the parent."""
        return self._parent.send(tensor, self._members[dst], tag)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Receive through the parent."""
        return self._parent.receive(tensor, self._members[src], tag)
