"""Some ranks of a transport as a transport of their own; made by `Communicator.split`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .transport import Pending, Transport


class Group(Transport):
    """Ranks `members` of `parent`, numbered in that order."""

    def __init__(self, parent: Transport, members: tuple[int, ...]) -> None:
        self._parent, self._members = parent, members
        self._rank = members.index(parent.rank)
        self.name = parent.name
        self.per_node = _per_node(members, parent.per_node)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._members)

    @property
    def doing(self) -> object:
        """What this rank is about; kept by the parent, which does the waiting."""
        return self._parent.doing

    @doing.setter
    def doing(self, what: object) -> None:
        self._parent.doing = what

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Send through the parent."""
        return self._parent.send(tensor, self._members[dst], tag)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Receive through the parent."""
        return self._parent.receive(tensor, self._members[src], tag)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """Exchange through the parent."""
        names = self._members
        return self._parent.exchange([(t, names[r]) for t, r in sends], [(t, names[r]) for t, r in receives], tag)


def _per_node(members: tuple[int, ...], per_node: int | None) -> int | None:
    """Ranks per host of a group, where its hosts are equal and in a row too."""
    if per_node is None:
        return None
    hosts = [rank // per_node for rank in members]
    n = hosts.count(hosts[0])
    found = [hosts[i : i + n] for i in range(0, len(hosts), n)]
    whole = all(len(set(part)) == 1 and len(part) == n for part in found)
    return n if whole and len({part[0] for part in found}) == len(found) else None
