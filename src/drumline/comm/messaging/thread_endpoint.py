"""An endpoint between threads of one process: frames are passed by reference and copied once, by the receiver."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ...core.errors import GaveUp
from .endpoint import Endpoint, OutgoingFrame

T = TypeVar("T")

_SMALL = 8 << 10
"""Bodies up to this size are copied by the sender, which then need not wait for the receiver."""


class _Frame:
    """A frame in a rank's inbox."""

    __slots__ = ("body", "done", "head", "src")

    def __init__(self, src: int, head: bytes, body: memoryview, *, done: bool) -> None:
        self.src, self.head, self.body, self.done = src, head, body, done


class _Inbox:
    """The frames sent to one rank."""

    def __init__(self) -> None:
        self.frames: deque[_Frame] = deque()
        self.changed = threading.Condition()


class ThreadInboxes:
    """The inboxes of p ranks, shared by their endpoints."""

    def __init__(self, p: int) -> None:
        self.inboxes = [_Inbox() for _ in range(p)]
        self.dead: set[int] = set()

    def fail(self, rank: int) -> None:
        """Record that a rank failed, and wake all ranks that wait."""
        self.dead.add(rank)
        for box in self.inboxes:
            with box.changed:
                box.changed.notify_all()


class ThreadEndpoint(Endpoint):
    """The endpoint of one thread, or of a single rank."""

    def __init__(self, world: ThreadInboxes | None = None, rank: int = 0) -> None:
        self._world, self._rank = world or ThreadInboxes(1), rank
        self._box = self._world.inboxes[rank]

    @property
    def rank(self) -> int:
        """This thread's number."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of threads."""
        return len(self._world.inboxes)

    def put(self, dst: int, head: bytes, body: memoryview) -> OutgoingFrame:
        """Put the frame into the inbox; a long body is copied later, by the receiver."""
        small = body.nbytes <= _SMALL
        frame = _Frame(self._rank, head, memoryview(bytes(body)) if small else body, done=small)
        box = self._world.inboxes[dst]
        with box.changed:
            box.frames.append(frame)
            box.changed.notify_all()
        return frame

    def progress(self, timeout: float) -> bool:
        """Process the inbox; wait if it is empty."""
        box = self._box
        if not box.frames:
            with box.changed:
                if not box.frames and timeout > 0:
                    if self._world.dead:
                        self._raise_failure()
                    box.changed.wait(timeout)
                if not box.frames:
                    if self._world.dead:
                        self._raise_failure()
                    return False
        while box.frames:
            self._deliver(box.frames.popleft())
        return True

    def _deliver(self, frame: _Frame) -> None:
        into = self.receiver.begin(frame.src, frame.head, frame.body.nbytes)
        into[:] = frame.body
        self.receiver.end(frame.src, frame.head, into)
        if not frame.done:
            frame.done = True
            frame.body = memoryview(b"")
            home = self._world.inboxes[frame.src]
            with home.changed:  # the sender may sleep until its memory is free
                home.changed.notify_all()

    def _raise_failure(self) -> None:
        others = sorted(self._world.dead - {self._rank})
        if others:
            raise GaveUp(f"rank {self._rank} waits, but rank {others[0]} failed")


def run_endpoints(fn: Callable[[Endpoint], T], p: int) -> list[T]:
    """Run `fn(endpoint)` on p threads; returns their results. The first error ends the others and is raised."""
    world = ThreadInboxes(p)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            results[rank] = fn(ThreadEndpoint(world, rank))
        except BaseException as e:
            errors.append((rank, e))
            world.fail(rank)

    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r} of {p}", daemon=True) for r in range(p)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        rank, error = errors[0]
        error.add_note(f"in rank {rank} of {p}")
        raise error
    return [results[rank] for rank in range(p)]
