"""Ranks as threads of one process: the cheapest transport, for tests, demonstrations and notebooks.

All ranks are visible to the process, so a deadlock is detected at once, and every rank's line is reported.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ..core.errors import GaveUp, InputError
from .call_check import call_site
from .operators import dtype_name
from .transport import PendingMessage, Transport

T = TypeVar("T")
Key = tuple[int, int, int]
"""(src, dst, tag)."""


class _World:
    """The state that the threads share: messages by key, agreements by number, and each rank's wait."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.boxes: dict[Key, deque[Tensor]] = {}
        self.agreements: dict[int, dict[int, bytes]] = {}
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

    def take(self, key: Key, call: object) -> Tensor:
        src, dst, tag = key
        with self.lock:
            if key not in self.boxes:
                words = f"rank {src}, in {call}" if call is not None else f"rank {src} (tag {tag}), at {call_site()}"
                self._wait(dst, lambda: key in self.boxes, words)
            box = self.boxes[key]
            tensor = box.popleft()
            if not box:
                del self.boxes[key]
            return tensor

    def agree(self, rank: int, number: int, word: bytes, call: object) -> list[bytes]:
        """Every rank's word, when all ranks have called it."""
        with self.lock:
            table = self.agreements.setdefault(number, {})
            table[rank] = word
            if len(table) < self.size:
                self._wait(rank, lambda: len(table) == self.size, f"the others, in {call}")
            else:
                for condition in self.awake:
                    condition.notify_all()
                self.agreements.pop(number)
            return [table[r] for r in range(self.size)]

    def _wait(self, rank: int, ready: Callable[[], bool], words: str) -> None:
        """Sleep until it is ready, a rank fails, or all ranks are blocked."""
        if self.threads.get(rank) == threading.get_ident():
            # A rank's helper threads may make progress for it, so only a wait of its own thread blocks it.
            self.waiting[rank] = ready, words
            self._detect_deadlock()
        try:
            self.awake[rank].wait_for(lambda: ready() or self.failed is not None or self.stuck, self.timeout)
        finally:
            self.waiting.pop(rank, None)
        if ready():
            return
        if self.stuck:
            raise GaveUp(self.stuck, rule="a rank that waits needs another that continues")
        if self.failed is not None:
            raise GaveUp(f"rank {rank} waits for {words}; but rank {self.failed} failed")
        raise GaveUp(
            f"rank {rank} waited {self.timeout:g} s for {words}",
            rule="all ranks call the same collectives in the same order",
        )

    def _detect_deadlock(self) -> None:
        """If every rank waits or has ended, and no wait can be satisfied, fail all waits."""
        if self.stuck or self.failed is not None or not self.waiting or len(self.waiting) + len(self.ended) < self.size:
            return
        if any(ready() for ready, _ in self.waiting.values()):
            return
        lines = {rank: f"waits for {words}" for rank, (_, words) in self.waiting.items()}
        lines |= dict.fromkeys(self.ended, "has ended")
        self.stuck = "all ranks are blocked:\n    " + "\n    ".join(f"rank {r} {lines[r]}" for r in sorted(lines))
        for condition in self.awake:
            condition.notify_all()

    def begin(self, rank: int) -> None:
        self.threads[rank] = threading.get_ident()

    def end(self, rank: int, *, failed: bool) -> None:
        with self.lock:
            self.ended.add(rank)
            if failed and self.failed is None:
                self.failed = rank
            self._detect_deadlock()
            for condition in self.awake:
                condition.notify_all()


class _CompletedSend:
    """A completed send: the message was copied."""

    def wait(self) -> None:
        """Return at once."""


class _Receive:
    """A receive that copies at the wait."""

    def __init__(self, transport: ThreadTransport, key: Key, into: Tensor) -> None:
        self.transport, self.key, self.into = transport, key, into

    def wait(self) -> None:
        """Block until the message arrives."""
        tensor, into = self.transport.world.take(self.key, self.transport.current_call), self.into
        if tensor.numel() != into.numel() or tensor.dtype != into.dtype:
            src, dst, _ = self.key
            raise InputError(
                f"rank {src} sent {tensor.numel()} elements of {dtype_name(tensor.dtype)}, "
                f"rank {dst} expects {into.numel()} of {dtype_name(into.dtype)}",
                where=str(self.transport.current_call or call_site()),
                rule="a message has the number and type of elements that its receiver expects",
            )
        into.copy_(tensor.view(into.shape))


class ThreadTransport(Transport):
    """The transport of one thread. Made by `run_threads`."""

    name = "threads"

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self._rank = world, rank
        self._agreements = 0

    @property
    def rank(self) -> int:
        """This thread's number."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of threads."""
        return self.world.size

    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        """Copy the message, so that the sender need not wait for the receiver."""
        self.world.put((self._rank, dst, tag), tensor.detach().clone())
        return _CompletedSend()

    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        """Take the message at the wait."""
        return _Receive(self, (src, self._rank, tag), tensor)

    def agree(self, word: bytes) -> list[bytes]:
        """Exchange words through the shared table."""
        self._agreements += 1
        return self.world.agree(self._rank, self._agreements, word, self.current_call or f"agree, at {call_site()}")


def run_threads(fn: Callable[[Transport], T], p: int, *, timeout: float = 60.0) -> list[T]:
    """Run `fn(transport)` on p ranks, one thread each; returns their results by rank.

    The first error of any rank ends the others and is raised, with a note that names the rank. A message that was never
    received is an error too. `timeout` limits the wait for one message from a running rank; if all ranks are blocked
    they end at once, and each one's wait is reported.
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
