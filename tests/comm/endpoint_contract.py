"""The contract of every endpoint, for any number of ranks: each check runs on all ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from drumline.comm.messaging.endpoint import Endpoint

Check = Callable[[Endpoint], None]
SIZES = (0, 1, 7, 100, 5000, 70_000, 3_000_000)


class FrameReceiver:
    """Records all frames, and when each started."""

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


def until(endpoint: Endpoint, ready: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "the endpoint is stuck"
        endpoint.progress(0.05)


def settle(endpoint: Endpoint, expected: int) -> None:
    """Wait until `expected` frames have arrived on every rank: no rank leaves while others wait.

    Each call waits for its own frames, so that none is left for the next endpoint.
    """

    def settled_frames() -> int:
        return len([f for f in endpoint.receiver.frames if f[1] == b"settled"])

    until(endpoint, lambda: len(endpoint.receiver.frames) - settled_frames() >= expected)
    endpoint.receiver.settled += endpoint.size
    for dst in range(endpoint.size):
        endpoint.put(dst, b"settled", memoryview(b""))
    until(endpoint, lambda: settled_frames() >= endpoint.receiver.settled)


def frames_arrive_whole_and_in_order(endpoint: Endpoint) -> None:
    desk = endpoint.receiver = FrameReceiver()
    outgoing = []
    for size in SIZES:
        for dst in range(endpoint.size):
            outgoing.append(endpoint.put(dst, b"h%d" % size, memoryview(body_of(endpoint.rank, dst, size))))
    settle(endpoint, len(SIZES) * endpoint.size)
    until(endpoint, lambda: all(o.done for o in outgoing))
    for src in range(endpoint.size):
        mine = [f for f in desk.frames if f[0] == src and f[1] != b"settled"]
        assert [f[1] for f in mine] == [b"h%d" % size for size in SIZES]
        assert all(f[2] == body_of(src, endpoint.rank, size) for f, size in zip(mine, SIZES, strict=True))
    assert sorted((s, h, n) for s, h, n in desk.begun) == sorted((s, h, len(b)) for s, h, b in desk.frames)


def memory_may_be_reused_when_done(endpoint: Endpoint) -> None:
    desk = endpoint.receiver = FrameReceiver()
    dst = (endpoint.rank + 1) % endpoint.size
    memory = bytearray(b"a" * 200_000)
    out = endpoint.put(dst, b"first", memoryview(memory))
    until(endpoint, lambda: out.done)
    memory[:] = b"b" * len(memory)
    settle(endpoint, 1)
    first = next(f for f in desk.frames if f[1] == b"first")
    assert first[2] == b"a" * len(memory)


def progress_respects_its_timeout(endpoint: Endpoint) -> None:
    endpoint.receiver = FrameReceiver()
    settle(endpoint, 0)
    if endpoint.size == 1:
        start = time.monotonic()
        assert endpoint.progress(0.2) is False
        assert 0.15 < time.monotonic() - start < 5.0  # a busy machine wakes it late
        assert endpoint.progress(0.0) is False
    settle(endpoint, 0)


def many_small_frames(endpoint: Endpoint) -> None:
    desk = endpoint.receiver = FrameReceiver()
    n = 300
    for i in range(n):
        for dst in range(endpoint.size):
            endpoint.put(dst, b"n", memoryview(i.to_bytes(4, "little")))
        if i % 50 == 0:
            endpoint.progress(0.0)
    settle(endpoint, n * endpoint.size)
    for src in range(endpoint.size):
        numbers = [int.from_bytes(b, "little") for s, h, b in desk.frames if s == src and h == b"n"]
        assert numbers == list(range(n))


CHECKS: list[Check] = [
    frames_arrive_whole_and_in_order,
    memory_may_be_reused_when_done,
    progress_respects_its_timeout,
    many_small_frames,
]
