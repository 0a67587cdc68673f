"""The interface below tags, wildcards and probes: frames of bytes between ranks, in order from each sender.

A frame is a short head (the fields that `matching` needs) and a body. The endpoint interprets neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol


class FrameReceiver(Protocol):
    """Takes incoming frames. Called from inside `Endpoint.progress`, by the thread that called it."""

    def begin(self, src: int, head: bytes, size: int) -> memoryview:
        """A frame starts to arrive: returns the memory for its body of `size` bytes."""

    def end(self, src: int, head: bytes, body: memoryview) -> None:
        """The frame is complete, in the memory that `begin` returned."""


class OutgoingFrame(Protocol):
    """A frame being sent."""

    done: bool
    """Whether the memory of the body may be used again."""


class Endpoint(ABC):
    """One rank's end of the connections to all ranks. Frames of one (src, dst) arrive in the order they were sent.

    Nothing moves in the background: `progress` moves it. Only one thread at a time calls `put` and `progress`, which
    `matching` ensures.
    """

    receiver: FrameReceiver
    """Set once, before the first `progress`."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def put(self, dst: int, head: bytes, body: memoryview) -> OutgoingFrame:
        """Start to send a frame, also to this rank; never blocks. `body` must not change until it is `done`."""

    @abstractmethod
    def progress(self, timeout: float) -> bool:
        """Send and receive what is ready; if nothing is, wait at most `timeout` seconds. Returns whether data moved.

        Raises GaveUp if a rank that is sent to, or received from, is known to have died.
        """

    def gone(self, rank: int) -> str:
        """Why a rank can send nothing more, such as "has died"; empty if it is alive or unknown."""
        return ""

    def close(self) -> None:  # noqa: B027  # most endpoints have nothing to close
        """Release the endpoint's resources."""
