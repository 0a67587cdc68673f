"""A post office between threads of one process: frames by reference, copied once, by the receiver."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ...core.errors import GaveUp
from .post import Outgoing, Post

T = TypeVar("T")

_SMALL = 8 << 10
"""Bodies up to this size are copied when they are put: the sender need not wait for the receiver."""


class _Frame:
    """A frame in somebody's box."""

    __slots__ = ("body", "done", "head", "src")

    def __init__(self, src: int, head: bytes, body: memoryview, *, done: bool) -> None:
        self.src, self.head, self.body, self.done = src, head, body, done


class _Box:
    """What has been put for one rank."""

    def __init__(self) -> None:
        self.frames: deque[_Frame] = deque()
        self.changed = threading.Condition()


class ThreadWorld:
    """The boxes of p ranks, shared by their post offices."""

    def __init__(self, p: int) -> None:
        self.boxes = [_Box() for _ in range(p)]
        self.dead: set[int] = set()

    def fail(self, rank: int) -> None:
        """A rank has failed: whoever waits is told."""
        self.dead.add(rank)
        for box in self.boxes:
            with box.changed:
                box.changed.notify_all()


class ThreadPost(Post):
    """The post office of one thread; of one rank alone, too."""

    def __init__(self, world: ThreadWorld | None = None, rank: int = 0) -> None:
        self._world, self._rank = world or ThreadWorld(1), rank
        self._box = self._world.boxes[rank]

    @property
    def rank(self) -> int:
        """This thread's number."""
        return self._rank

    @property
    def size(self) -> int:
        """How many threads there are."""
        return len(self._world.boxes)

    def put(self, dst: int, head: bytes, body: memoryview) -> Outgoing:
        """Leave the frame in the box; a long body stays where it is until the receiver has copied it."""
        small = body.nbytes <= _SMALL
        frame = _Frame(self._rank, head, memoryview(bytes(body)) if small else body, done=small)
        box = self._world.boxes[dst]
        with box.changed:
            box.frames.append(frame)
            box.changed.notify_all()
        return frame

    def progress(self, timeout: float) -> bool:
        """Take what is in the box; if there is nothing, wait for it."""
        box = self._box
        if not box.frames:
            with box.changed:
                if not box.frames and timeout > 0:
                    if self._world.dead:
                        self._mourn()
                    box.changed.wait(timeout)
                if not box.frames:
                    if self._world.dead:
                        self._mourn()
                    return False
        while box.frames:
            self._deliver(box.frames.popleft())
        return True

    def _deliver(self, frame: _Frame) -> None:
        into = self.desk.begin(frame.src, frame.head, frame.body.nbytes)
        into[:] = frame.body
        self.desk.end(frame.src, frame.head, into)
        if not frame.done:
            frame.done = True
            frame.body = memoryview(b"")
            home = self._world.boxes[frame.src]
            with home.changed:  # the sender may sleep at its own box until its memory is free
                home.changed.notify_all()

    def _mourn(self) -> None:
        others = sorted(self._world.dead - {self._rank})
        if others:
            raise GaveUp(f"rank {self._rank} waits, but rank {others[0]} failed")


def run_posts(fn: Callable[[Post], T], p: int) -> list[T]:
    """Run `fn(post)` on p ranks, one thread each; what each returned. The first error ends the others and is raised."""
    world = ThreadWorld(p)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            results[rank] = fn(ThreadPost(world, rank))
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
