"""Ranks as threads of one process: the cheapest transport, for tests, demonstrations and notebooks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ..errors import GaveUp, InputError
from .transport import Pending, Transport

T = TypeVar("T")


class _World:
    """What the threads share: a box of messages by (src, dst, tag), and whether a rank has failed."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.boxes: dict[tuple[int, int, int], deque[Tensor]] = {}
        self.changed = threading.Condition()
        self.failed: int | None = None

    def put(self, key: tuple[int, int, int], tensor: Tensor) -> None:
        with self.changed:
            self.boxes.setdefault(key, deque()).append(tensor)
            self.changed.notify_all()

    def take(self, key: tuple[int, int, int]) -> Tensor:
        src, dst, tag = key
        with self.changed:
            there = self.changed.wait_for(lambda: key in self.boxes or self.failed is not None, self.timeout)
            if key in self.boxes:
                tensor = self.boxes[key].popleft()
                if not self.boxes[key]:
                    del self.boxes[key]
                return tensor
            if there:
                raise GaveUp(f"rank {dst} waits for rank {src}, but rank {self.failed} failed")
            raise GaveUp(
                f"rank {dst} waited {self.timeout:g} s for rank {src} (tag {tag})",
                rule="all ranks call the same collectives in the same order",
            )

    def fail(self, rank: int) -> None:
        with self.changed:
            if self.failed is None:
                self.failed = rank
            self.changed.notify_all()


class _Sent:
    """A send that is done: the world holds a copy."""

    def wait(self) -> None:
        """Nothing to wait for."""


class _Receive:
    """A receive that copies when it is waited for."""

    def __init__(self, world: _World, key: tuple[int, int, int], into: Tensor) -> None:
        self.world, self.key, self.into = world, key, into

    def wait(self) -> None:
        """Block until the message is there."""
        tensor, into = self.world.take(self.key), self.into
        if tensor.numel() != into.numel() or tensor.dtype != into.dtype:
            src, dst, _ = self.key
            raise InputError(
                f"rank {src} sent {tensor.numel()} elements of {tensor.dtype}, "
                f"rank {dst} expects {into.numel()} of {into.dtype}",
                rule="all ranks call a collective with the same number and type of elements",
            )
        into.copy_(tensor.view(into.shape))


class ThreadTransport(Transport):
    """One thread of a world of threads. Made by `run_threads`."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world, self._rank = world, rank

    @property
    def rank(self) -> int:
        """This thread's number."""
        return self._rank

    @property
    def size(self) -> int:
        """How many threads there are."""
        return self._world.size

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Leave a copy in the box: the receiver may be slow, and the sender goes on."""
        self._world.put((self._rank, dst, tag), tensor.detach().clone())
        return _Sent()

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Take from the box at the wait."""
        return _Receive(self._world, (src, self._rank, tag), tensor)


def run_threads(fn: Callable[[Transport], T], p: int, *, timeout: float = 60.0) -> list[T]:
    """Run `fn(transport)` on p ranks, one thread each; what each returned, by rank.

    The first error of any rank ends the others and is raised, with a note that names the rank. A message that nobody
    received is an error too. `timeout` is how long a rank waits for one message.
    """
    if p < 1:
        raise InputError(f"{p} ranks", rule="at least one")
    world = _World(p, timeout)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = fn(ThreadTransport(world, rank))
        except BaseException as e:
            errors[rank] = e
            world.fail(rank)

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
