"""Messages being sent, awaited, or received before a receive was posted; and the queues that match them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from .endpoint import OutgoingFrame

ANY = -1
"""Any source, or any tag."""


class Waitable(Protocol):
    """An operation that can be waited for."""

    @property
    def done(self) -> bool:
        """Whether it is complete."""

    @property
    def peers(self) -> Sequence[int]:
        """The ranks of which one must act before it completes."""

    def about(self) -> str:
        """A description for error messages."""


class SendOperation:
    """A message being sent."""

    __slots__ = ("acked", "dst", "frame", "tag")

    def __init__(self, dst: int, tag: int, frame: OutgoingFrame, *, acked: bool) -> None:
        self.dst, self.tag, self.frame, self.acked = dst, tag, frame, acked

    @property
    def done(self) -> bool:
        """Whether its memory is free and, for a synchronous send, a receive has matched it."""
        return self.acked and self.frame.done

    @property
    def peers(self) -> Sequence[int]:
        """The rank that must receive it."""
        return (self.dst,)

    def about(self) -> str:
        """A description for error messages."""
        return f"to rank {self.dst}, tag {self.tag}"


class ReceiveOperation:
    """A receive, posted or matched. `into` is its memory; None allocates it when the size is known."""

    __slots__ = ("among", "cancelled", "context", "done", "into", "nbytes", "source", "src", "tag", "type_code", "want")

    def __init__(self, context: int, src: int, tag: int, into: memoryview | None, among: Sequence[int] = ()) -> None:
        self.context, self.src, self.want, self.into, self.among = context, src, tag, into, among
        self.source, self.tag, self.nbytes, self.type_code = ANY, tag, 0, 0
        self.done = self.cancelled = False

    @property
    def peers(self) -> Sequence[int]:
        """The ranks that may send it."""
        return self.among if self.src == ANY else (self.src,)

    @property
    def truncated(self) -> bool:
        """Whether the message was larger than its memory; then it was dropped."""
        return self.into is not None and self.nbytes > self.into.nbytes

    def about(self) -> str:
        """A description for error messages."""
        who = "any rank" if self.src == ANY else f"rank {self.src}"
        return f"from {who}, {'any tag' if self.want == ANY else f'tag {self.want}'}"


class UnexpectedMessage:
    """A message that no receive has matched yet; its body may still be arriving."""

    __slots__ = ("complete", "context", "data", "nbytes", "receive", "serial", "src", "tag", "type_code")

    def __init__(self, context: int, src: int, tag: int, type_code: int, serial: int, nbytes: int) -> None:
        self.context, self.src, self.tag, self.type_code, self.serial = context, src, tag, type_code, serial
        self.nbytes, self.data = nbytes, memoryview(bytearray(nbytes))
        self.complete = False
        self.receive: ReceiveOperation | None = None


class MessageQueues:
    """Posted receives and unexpected messages, by context. Used by one thread at a time.

    A message takes the oldest receive that matches it, a receive the oldest message, so messages do not overtake.
    """

    def __init__(self) -> None:
        self._posted: dict[int, list[ReceiveOperation]] = {}
        self._unexpected: dict[int, deque[UnexpectedMessage]] = {}

    def post(self, receive: ReceiveOperation) -> None:
        """Queue a receive that no message has matched."""
        self._posted.setdefault(receive.context, []).append(receive)

    def keep(self, message: UnexpectedMessage) -> None:
        """Queue a message that no receive has matched."""
        self._unexpected.setdefault(message.context, deque()).append(message)

    def claim(self, context: int, src: int, tag: int) -> ReceiveOperation | None:
        """Remove and return the oldest receive that matches a message."""
        posted = self._posted.get(context)
        if posted:
            for i, receive in enumerate(posted):
                if receive.src in (src, ANY) and receive.want in (tag, ANY):
                    del posted[i]
                    return receive
        return None

    def find(self, context: int, src: int, tag: int, *, take: bool) -> UnexpectedMessage | None:
        """The oldest message that matches a receive; `take` removes it from the queue."""
        unexpected = self._unexpected.get(context)
        if unexpected:
            for i, message in enumerate(unexpected):
                if src in (message.src, ANY) and tag in (message.tag, ANY):
                    if take:
                        del unexpected[i]
                    return message
        return None

    def withdraw(self, item: object) -> bool:
        """Cancel a receive if no message has matched it; returns whether it was cancelled."""
        if not isinstance(item, ReceiveOperation) or item not in self._posted.get(item.context, ()):
            return False
        self._posted[item.context].remove(item)
        item.cancelled = item.done = True
        return True
