"""An endpoint over ring buffers in shared memory, one ring for each ordered pair of ranks."""

from __future__ import annotations

import struct
import time
from collections import deque
from dataclasses import dataclass, field

import numpy

from ...core.errors import GaveUp
from ..messaging.endpoint import Endpoint, FrameReceiver, OutgoingFrame
from .core import NativeCore
from .python_core import PythonCore

_PREFIX = struct.Struct("<IQ")
"""Bytes of the head, bytes of the body."""
_SLICE = 0.1
"""Seconds of sleep between two checks whether the receivers are alive."""
_SHORT = 8192
"""A body up to this size is written together with its head: one call instead of two."""


@dataclass(slots=True, eq=False)
class _Frame:
    """A frame being sent: the parts that are not in the ring yet."""

    keep: object
    """Keeps the memory alive."""
    parts: deque[tuple[int, int]]
    """(address, bytes) still to be written."""
    done: bool = False


@dataclass(slots=True)
class _Incoming:
    """A frame being received: first the prefix and the head, then the body."""

    lead: bytearray = field(default_factory=lambda: bytearray(_PREFIX.size))
    have: int = 0
    head: bytes | None = None
    body: memoryview | None = None
    address: int = 0


class ShmEndpoint(Endpoint):
    """The endpoint of one rank of a group with shared memory."""

    desk: FrameReceiver

    def __init__(self, core: NativeCore | PythonCore) -> None:
        self._core = core
        self._out: dict[int, deque[_Frame]] = {s: deque() for s in range(core.size)}
        self._busy: set[int] = set()
        self._in = [_Incoming() for _ in range(core.size)]
        self._local: deque[tuple[bytes, memoryview, _Frame]] = deque()
        self._next = 0

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._core.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._core.size

    def put(self, dst: int, head: bytes, body: memoryview) -> OutgoingFrame:
        """Write what fits now; the rest follows when there is room."""
        body = body.cast("B") if body.nbytes else memoryview(b"")
        if dst == self.rank:
            frame = _Frame(body, deque())
            self._local.append((head, body, frame))
            return frame
        lead = _PREFIX.pack(len(head), body.nbytes) + head
        if body.nbytes <= _SHORT:
            lead += body
        memory = numpy.frombuffer(lead, numpy.uint8)
        frame = _Frame((memory, body), deque([(memory.ctypes.data, len(lead))]))
        if body.nbytes > _SHORT:
            rest = numpy.frombuffer(body, numpy.uint8)
            frame.keep = (memory, rest)
            frame.parts.append((rest.ctypes.data, body.nbytes))
        self._out[dst].append(frame)
        self._busy.add(dst)
        self._push(dst)
        return frame

    def progress(self, timeout: float) -> bool:
        """Write and read; if nothing moves, sleep until a peer wrote or read."""
        end = time.monotonic() + timeout
        while True:
            seen = self._core.bell(0, 0)
            if self._move():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._core.bell(seen, max(1, int(min(left, _SLICE) * 1000)))
            for dst in self._busy:
                if reason := self.gone(dst):
                    raise GaveUp(f"rank {self.rank} sends to rank {dst}, which {reason}")

    def gone(self, rank: int) -> str:
        """Report a rank whose process has ended."""
        state = "alive" if rank == self.rank else self._core.segment.state(rank)
        if state == "alive" or self._core.readable(rank):
            return ""
        return "has left the group" if state == "left" else "has died"

    def _move(self) -> bool:
        moved = False
        while self._local:
            head, body, frame = self._local.popleft()
            into = self.receiver.begin(self.rank, head, body.nbytes)
            into[:] = body
            frame.done = moved = True
            self.receiver.end(self.rank, head, into)
        for dst in tuple(self._busy):
            moved |= self._push(dst)
        while (src := self._core.first_readable(self._next)) >= 0:
            self._pull(src)
            self._next = (src + 1) % self.size
            moved = True
        return moved

    def _push(self, dst: int) -> bool:
        """Write frames to `dst` until its ring is full."""
        queue, moved = self._out[dst], False
        while queue:
            frame = queue[0]
            while frame.parts:
                address, n = frame.parts.popleft()
                wrote = self._core.write(dst, address, n)
                moved |= wrote > 0
                if wrote < n:
                    frame.parts.appendleft((address + wrote, n - wrote))
                    return moved
            frame.done, frame.keep = True, None
            queue.popleft()
        self._busy.discard(dst)
        return moved

    def _pull(self, src: int) -> None:
        """Read from `src`, at most to the end of a frame."""
        state = self._in[src]
        if state.body is None and not self._read_lead(src, state):
            return
        assert state.body is not None and state.head is not None
        left = state.body.nbytes - state.have
        if left:
            state.have += self._core.read(src, state.address + state.have, left)
        if state.have == state.body.nbytes:
            head, body = state.head, state.body
            self._in[src] = _Incoming()
            self.receiver.end(src, head, body)

    def _read_lead(self, src: int, state: _Incoming) -> bool:
        """Read the prefix, then the head; returns whether both are complete."""
        while state.have < len(state.lead):
            memory = numpy.frombuffer(state.lead, numpy.uint8)
            got = self._core.read(src, memory.ctypes.data + state.have, len(state.lead) - state.have)
            del memory
            if not got:
                return False
            state.have += got
            if state.have == _PREFIX.size == len(state.lead):
                state.lead.extend(bytes(_PREFIX.unpack(state.lead)[0]))
        size = _PREFIX.unpack_from(state.lead)[1]
        state.head = bytes(state.lead[_PREFIX.size :])
        body = self.receiver.begin(src, state.head, size)
        state.body = body.cast("B") if size else memoryview(bytearray())
        state.address = numpy.frombuffer(state.body, numpy.uint8).ctypes.data if size else 0
        state.have = 0
        return True
