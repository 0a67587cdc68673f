"""A message on its way: being sent, awaited, or arrived before anyone asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .post import Outgoing

ANY = -1
"""Any source, or any tag."""


class Item(Protocol):
    """What can be waited for."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to wait for."""

    @property
    def peers(self) -> Sequence[int]:
        """The ranks of which one must act before it is done."""

    def about(self) -> str:
        """What it is, for a message to the user."""


class Sending:
    """A message on its way out."""

    __slots__ = ("acked", "dst", "out", "tag")

    def __init__(self, dst: int, tag: int, out: Outgoing, *, acked: bool) -> None:
        self.dst, self.tag, self.out, self.acked = dst, tag, out, acked

    @property
    def done(self) -> bool:
        """Whether its memory is free and, if it was asked for, a receive has met it."""
        return self.acked and self.out.done

    @property
    def peers(self) -> Sequence[int]:
        """Who must take it."""
        return (self.dst,)

    def about(self) -> str:
        """What it is."""
        return f"to rank {self.dst}, tag {self.tag}"


class Receive:
    """A receive, posted or met. `into` is where it goes; None: into memory that is made when its size is known."""

    __slots__ = ("among", "cancelled", "context", "done", "elements", "into", "nbytes", "source", "src", "tag", "want")

    def __init__(self, context: int, src: int, tag: int, into: memoryview | None, among: Sequence[int] = ()) -> None:
        self.context, self.src, self.want, self.into, self.among = context, src, tag, into, among
        self.source, self.tag, self.nbytes, self.elements = ANY, tag, 0, 0
        self.done = self.cancelled = False

    @property
    def peers(self) -> Sequence[int]:
        """Who may send it."""
        return self.among if self.src == ANY else (self.src,)

    @property
    def truncated(self) -> bool:
        """Whether more came than fitted; nothing of it was kept."""
        return self.into is not None and self.nbytes > self.into.nbytes

    def about(self) -> str:
        """What it is."""
        who = "any rank" if self.src == ANY else f"rank {self.src}"
        return f"from {who}, {'any tag' if self.want == ANY else f'tag {self.want}'}"


class Arrival:
    """A message that nobody has asked for yet; it may still be on its way in."""

    __slots__ = ("context", "data", "elements", "nbytes", "receive", "serial", "src", "tag", "there")

    def __init__(self, context: int, src: int, tag: int, elements: int, serial: int, nbytes: int) -> None:
        self.context, self.src, self.tag, self.elements, self.serial = context, src, tag, elements, serial
        self.nbytes, self.data = nbytes, memoryview(bytearray(nbytes))
        self.there = False
        self.receive: Receive | None = None
