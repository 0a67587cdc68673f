"""Ranks as threads of one process: the cheapest transport, for tests, demonstrations and notebooks.

One process sees all of its ranks, so a deadlock is known at the moment it happens, and every rank's line is named.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ..core.errors import GaveUp, InputError
from .calls import call_site
from .ops import name_of
from .transport import Pending, Transport

T = TypeVar("T")
Key = tuple[int, int, int]
"""(src, dst, tag)."""


class _World:
    """What the threads share: messages by key, meetings by number, and what each rank waits for."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.boxes: dict[Key, deque[Tensor]] = {}
        self.meetings: dict[int, dict[int, bytes]] = {}
        lock = threading.Lock()
        self.awake = [threading.Condition(lock) for _ in range(size)]
        self.lock = lock
        self.threads: dict[int, int] = {}
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.ended: set[int] = set()
        self.failed: int | None = None
        self.stuck = ""

    def put(self, key: Key, tensor: Tensor) -> None:
        with self.lock:
            self.boxes.setdefault(key, deque()).append(tensor)
            self.awake[key[1]].notify_all()

    def take(self, key: Key, doing: object) -> Tensor:
        src, dst, tag = key
        with self.lock:
            if key not in self.boxes:
                words = f"rank {src}, in {doing}" if doing is not None else f"rank {src} (tag {tag}), at {call_site()}"
                self._wait(dst, lambda: key in self.boxes, words)
            box = self.boxes[key]
            tensor = box.popleft()
            if not box:
                del self.boxes[key]
            return tensor

    def meet(self, rank: int, number: int, word: bytes, doing: object) -> list[bytes]:
        """Every rank's word of one meeting, when all have come."""
        with self.lock:
            table = self.meetings.setdefault(number, {})
            table[rank] = word
            if len(table) < self.size:
                self._wait(rank, lambda: len(table) == self.size, f"the others, in {doing}")
            else:
                for condition in self.awake:
                    condition.notify_all()
                self.meetings.pop(number)
            return [table[r] for r in range(self.size)]

    def _wait(self, rank: int, ready: Callable[[], bool], words: str) -> None:
        """Sleep until it is ready, a rank fails, or no rank can go on."""
        if self.threads.get(rank) == threading.get_ident():
            # Other threads of a rank may help it on, so only its own thread's wait is a standstill.
            self.waiting[rank] = ready, words
            self._judge()
        try:
            self.awake[rank].wait_for(lambda: ready() or self.failed is not None or self.stuck, self.timeout)
        finally:
            self.waiting.pop(rank, None)
        if ready():
            return
        if self.stuck:
            raise GaveUp(self.stuck, rule="a rank that waits needs another that goes on")
        if self.failed is not None:
            raise GaveUp(f"rank {rank} waits for {words}; but rank {self.failed} failed")
        raise GaveUp(
            f"rank {rank} waited {self.timeout:g} s for {words}",
            rule="all ranks call the same collectives in the same order",
        )

    def _judge(self) -> None:
        """When every rank waits or has ended, and nothing that is waited for is there, say so to all."""
        if self.stuck or self.failed is not None or not self.waiting or len(self.waiting) + len(self.ended) < self.size:
            return
        if any(ready() for ready, _ in self.waiting.values()):
            return
        lines = {rank: f"waits for {words}" for rank, (_, words) in self.waiting.items()}
        lines |= dict.fromkeys(self.ended, "has ended")
        self.stuck = "no rank can go on:\n    " + "\n    ".join(f"rank {r} {lines[r]}" for r in sorted(lines))
        for condition in self.awake:
            condition.notify_all()

    def begin(self, rank: int) -> None:
        self.threads[rank] = threading.get_ident()

    def end(self, rank: int, *, failed: bool) -> None:
        with self.lock:
            self.ended.add(rank)
            if failed and self.failed is None:
                self.failed = rank
            self._judge()
            for condition in self.awake:
                condition.notify_all()


class _Sent:
    """A send that is done: the world holds a copy."""

    def wait(self) -> None:
        """Nothing to wait for."""


class _Receive:
    """A receive that copies when it is waited for."""

    def __init__(self, transport: ThreadTransport, key: Key, into: Tensor) -> None:
        self.transport, self.key, self.into = transport, key, into

    def wait(self) -> None:
        """Block until the message is there."""
        tensor, into = self.transport.world.take(self.key, self.transport.doing), self.into
        if tensor.numel() != into.numel() or tensor.dtype != into.dtype:
            src, dst, _ = self.key
            raise InputError(
                f"rank {src} sent {tensor.numel()} elements of {name_of(tensor.dtype)}, "
                f"rank {dst} expects {into.numel()} of {name_of(into.dtype)}",
                where=str(self.transport.doing or call_site()),
                rule="a message has the number and type of elements that its receiver expects",
            )
        into.copy_(tensor.view(into.shape))


class ThreadTransport(Transport):
    """One thread of a world of threads. Made by `run_threads`."""

    name = "threads"

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self._rank = world, rank
        self._meetings = 0

    @property
    def rank(self) -> int:
        """This thread's number."""
        return self._rank

    @property
    def size(self) -> int:
        """How many threads there are."""
        return self.world.size

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Leave a copy in the box: the receiver may be slow, and the sender goes on."""
        self.world.put((self._rank, dst, tag), tensor.detach().clone())
        return _Sent()

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Take from the box at the wait."""
        return _Receive(self, (src, self._rank, tag), tensor)

    def agree(self, word: bytes) -> list[bytes]:
        """Meet in the shared table."""
        self._meetings += 1
        return self.world.meet(self._rank, self._meetings, word, self.doing or f"agree, at {call_site()}")


def run_threads(fn: Callable[[Transport], T], p: int, *, timeout: float = 60.0) -> list[T]:
    """Run `fn(transport)` on p ranks, one thread each; what each returned, by rank.

    The first error of any rank ends the others and is raised, with a note that names the rank. A message that nobody
    received is an error too. `timeout` is how long a rank waits for one message from a rank that goes on; when no rank
    can go on, all end at once, and each one's wait is named.
    """
    if p < 1:
        raise InputError(f"{p} ranks", rule="at least one")
    world = _World(p, timeout)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        world.begin(rank)
        try:
            results[rank] = fn(ThreadTransport(world, rank))
        except BaseException as e:
            errors[rank] = e
        world.end(rank, failed=rank in errors)

    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r} of {p}", daemon=True) for r in range(p)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if world.failed is not None:
        error = errors[world.failed]
        error.add_note(f"in rank {world.failed} of {p}")
        raise error
    for src, dst, tag in world.boxes:
        raise GaveUp(f"rank {src} sent rank {dst} a message that it never received (tag {tag})")
    return [results[r] for r in range(p)]
