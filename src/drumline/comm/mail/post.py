"""The seam below tags, wildcards and probes: frames of bytes between ranks, in order from each sender.

A frame is a short head (what `matching` needs to know of a message) and a body. The office knows nothing of either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol


class Desk(Protocol):
    """Who takes what arrives. Called from inside `Post.progress`, by the thread that called it."""

    def begin(self, src: int, head: bytes, size: int) -> memoryview:
        """A frame begins to arrive: where its body of `size` bytes shall be written."""

    def end(self, src: int, head: bytes, body: memoryview) -> None:
        """The frame is there, in the memory that `begin` gave."""


class Outgoing(Protocol):
    """A frame on its way out."""

    done: bool
    """Whether the body has left this rank's hands: its memory may be used again."""


class Post(ABC):
    """A post office of one rank. Frames of one (src, dst) arrive in the order in which they were put.

    Nothing moves by itself: `progress` moves it. One thread at a time calls `put` and `progress`: `matching` sees to
    that.
    """

    desk: Desk
    """Set once, before the first `progress`."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @abstractmethod
    def put(self, dst: int, head: bytes, body: memoryview) -> Outgoing:
        """Start to send a frame, also to oneself; never blocks. `body` must not change until it is `done`."""

    @abstractmethod
    def progress(self, timeout: float) -> bool:
        """Move what can be moved, in and out; if nothing can, wait at most `timeout` seconds. Whether anything moved.

        Raises GaveUp when a rank that something is expected from, or goes to, is known to have died.
        """

    def gone(self, rank: int) -> str:
        """Why nothing can come from that rank any more, such as "has died"; empty where it is there, or not known."""
        return ""

    def close(self) -> None:  # noqa: B027  # most offices have nothing to close
        """Let go of what the office holds."""
