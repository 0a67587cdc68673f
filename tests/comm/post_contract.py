"""What every post office must do, however many ranks: each check runs on all of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from drumline.comm.messaging.endpoint import Endpoint

Check = Callable[[Endpoint], None]
SIZES = (0, 1, 7, 100, 5000, 70_000, 3_000_000)


class FrameReceiver:
    """Keeps all that arrives; says when a frame began."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes, bytes]] = []
        self.begun: list[tuple[int, bytes, int]] = []
        self.settled = 0

    def begin(self, src: int, head: bytes, size: int) -> memoryview:
        self.begun.append((src, head, size))
        return memoryview(bytearray(size))

    def end(self, src: int, head: bytes, body: memoryview) -> None:
        self.frames.append((src, head, bytes(body)))


def body_of(src: int, dst: int, size: int) -> bytes:
    """Bytes that differ by all three."""
    seed = hashlib.sha256(f"{src} {dst} {size}".encode()).digest()
    return (seed * (size // 32 + 1))[:size]


def until(post: Endpoint, ready: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "the post office is stuck"
        post.progress(0.05)


def settle(post: Endpoint, expected: int) -> None:
    """Until `expected` frames are there, and everyone has said so: nobody leaves while others wait.

    Each call waits for words of its own, so that none of them is left for the office that comes next.
    """

    def words() -> int:
        return len([f for f in post.receiver.frames if f[1] == b"settled"])

    until(post, lambda: len(post.receiver.frames) - words() >= expected)
    post.receiver.settled += post.size
    for dst in range(post.size):
        post.put(dst, b"settled", memoryview(b""))
    until(post, lambda: words() >= post.receiver.settled)


def frames_arrive_whole_and_in_order(post: Endpoint) -> None:
    desk = post.receiver = FrameReceiver()
    outgoing = []
    for size in SIZES:
        for dst in range(post.size):
            outgoing.append(post.put(dst, b"h%d" % size, memoryview(body_of(post.rank, dst, size))))
    settle(post, len(SIZES) * post.size)
    until(post, lambda: all(o.done for o in outgoing))
    for src in range(post.size):
        mine = [f for f in desk.frames if f[0] == src and f[1] != b"settled"]
        assert [f[1] for f in mine] == [b"h%d" % size for size in SIZES]
        assert all(f[2] == body_of(src, post.rank, size) for f, size in zip(mine, SIZES, strict=True))
    assert sorted((s, h, n) for s, h, n in desk.begun) == sorted((s, h, len(b)) for s, h, b in desk.frames)


def memory_may_be_used_again_when_done(post: Endpoint) -> None:
    desk = post.receiver = FrameReceiver()
    dst = (post.rank + 1) % post.size
    memory = bytearray(b"a" * 200_000)
    out = post.put(dst, b"first", memoryview(memory))
    until(post, lambda: out.done)
    memory[:] = b"b" * len(memory)
    settle(post, 1)
    first = next(f for f in desk.frames if f[1] == b"first")
    assert first[2] == b"a" * len(memory)


def progress_waits_no_longer_than_told(post: Endpoint) -> None:
    post.receiver = FrameReceiver()
    settle(post, 0)
    if post.size == 1:
        start = time.monotonic()
        assert post.progress(0.2) is False
        assert 0.15 < time.monotonic() - start < 5.0  # a busy machine wakes it late
        assert post.progress(0.0) is False
    settle(post, 0)


def many_small_frames(post: Endpoint) -> None:
    desk = post.receiver = FrameReceiver()
    n = 300
    for i in range(n):
        for dst in range(post.size):
            post.put(dst, b"n", memoryview(i.to_bytes(4, "little")))
        if i % 50 == 0:
            post.progress(0.0)
    settle(post, n * post.size)
    for src in range(post.size):
        numbers = [int.from_bytes(b, "little") for s, h, b in desk.frames if s == src and h == b"n"]
        assert numbers == list(range(n))


CHECKS: list[Check] = [
    frames_arrive_whole_and_in_order,
    memory_may_be_used_again_when_done,
    progress_waits_no_longer_than_told,
    many_small_frames,
]
