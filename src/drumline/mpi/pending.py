"""Operations that were started and not yet completed: what a request waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..comm.messaging.matching import MessageMatcher
from ..comm.messaging.messages import Waitable
from . import constants as C
from .status import Status


class PendingOperation:
    """The operation of a request: items to wait for, and callbacks for their completion."""

    __slots__ = (
        "__weakref__",
        "cancel",
        "fill_status",
        "finish",
        "items",
        "matcher",
        "partitions",
        "start",
        "started",
        "then",
        "wait",
    )

    def __init__(
        self,
        matcher: MessageMatcher | None,
        items: Sequence[Waitable],
        finish: Callable[[], Any] = lambda: None,
        fill_status: Callable[[Status], None] = Status._fill,
        cancel: Callable[[], object] = lambda: None,
        start: Callable[[], PendingOperation] | None = None,
        wait: Callable[[], None] | None = None,
        then: Callable[[], Sequence[Waitable]] | None = None,
        partitions: Any = None,
    ) -> None:
        self.matcher, self.items = matcher, items
        self.finish, self.fill_status, self.cancel = finish, fill_status, cancel
        self.start, self.wait, self.then, self.partitions = start, wait, then, partitions
        """`wait` is set if another thread does the work. `then` returns further items when all are complete; it may
        post receives, so it is called outside of the matcher. `partitions` belongs to partitioned messages."""
        self.started = start is None
        """False for a persistent request between two starts."""

    @property
    def items_done(self) -> bool:
        """Whether all known items are complete."""
        return all(item.done for item in self.items)

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.then is None and self.items_done

    def advance(self) -> None:
        """Continue with further items, if there are any."""
        while self.then is not None and self.items_done:
            then, self.then = self.then, None
            self.items = then()

    def make_progress(self) -> bool:
        """Make progress without waiting; returns whether it is complete."""
        if not self.done and self.matcher is not None:
            self.matcher.make_progress()
            self.advance()
        return self.done

    def wait_for_items(self) -> None:
        """Return when it is complete."""
        while not self.done and self.matcher is not None:
            self.matcher.wait(*self.items)
            self.advance()

    def restart(self) -> None:
        """Start a persistent operation again."""
        assert self.start is not None
        begun = self.start()
        self.matcher, self.items, self.then, self.wait = begun.matcher, begun.items, begun.then, begun.wait
        self.finish, self.fill_status, self.cancel = begun.finish, begun.fill_status, begun.cancel
        self.started = True


def empty_status(status: Status | None) -> None:
    """Fill the status of a null or inactive request."""
    if status is not None:
        status._fill()


def null_message() -> PendingOperation:
    """A message to or from PROC_NULL."""
    return PendingOperation(None, (), fill_status=lambda status: status._fill(C.PROC_NULL, C.ANY_TAG))
