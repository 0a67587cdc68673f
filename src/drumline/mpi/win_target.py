"""The target's side of one-sided communication: requests to this rank's memory, executed while it makes progress.

A request is an active message: its tag is the operation, its body the byte ranges and data. Requests of one sender are
executed in order, so a reply to the last one implies that all before it are done.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..comm.messaging.matching import MessageMatcher
from .op import Op, combine
from .predefined_types import TYPES

PUT, GET, ACCUMULATE, SWAP, FLUSH, LOCK, UNLOCK, POST, COMPLETE, ANSWER, FAILED = range(11)
_HEAD = struct.Struct("<BBHI")
"""Operator, whether the old values are returned, datatype, number of byte ranges."""
_NAMES = sorted(name for name, kind in TYPES.items() if kind)
_OPS = [
    "MAX",
    "MIN",
    "SUM",
    "PROD",
    "LAND",
    "LOR",
    "LXOR",
    "BAND",
    "BOR",
    "BXOR",
    "MAXLOC",
    "MINLOC",
    "REPLACE",
    "NO_OP",
]

Blocks = Sequence[tuple[int, int]]
"""(offset, bytes) in the target's memory."""


class RmaReply:
    """A reply that this rank expects from a target."""

    def __init__(self, target: int, what: str) -> None:
        self.peers: Sequence[int] = (target,)
        self.done = False
        self.data = b""
        self.failed = False
        self._what = what

    def about(self) -> str:
        """A description for error messages."""
        return f"{self._what} rank {self.peers[0]}"


class RankCounter:
    """Counts notifications by rank, for Start and Wait."""

    def __init__(self, ranks: Sequence[int], counts: dict[int, int], what: str) -> None:
        self.ranks, self.counts, self._what = ranks, counts, what

    @property
    def peers(self) -> Sequence[int]:
        """The ranks that have not notified this one."""
        return [r for r in self.ranks if not self.counts.get(r)]

    @property
    def done(self) -> bool:
        """Whether all have."""
        return not self.peers

    def about(self) -> str:
        """A description for error messages."""
        return f"{self._what} ranks {list(self.peers)}"

    def take(self) -> None:
        """Consume one notification of each rank."""
        for rank in self.ranks:
            self.counts[rank] -= 1


def request_head(blocks: Blocks, op: str = "NO_OP", kind: str = "BYTE", *, fetch: bool = False) -> bytes:
    """Encode the head of a request."""
    flat = np.array(blocks, dtype=np.int64).reshape(-1)
    return _HEAD.pack(_OPS.index(op), fetch, _NAMES.index(kind), len(blocks)) + flat.tobytes()


class WindowTarget:
    """Executes the requests of other ranks on this rank's memory, and sends requests to theirs."""

    def __init__(
        self, matcher: MessageMatcher, context: int, memory: Callable[[int, int], memoryview], ops: dict[str, Op]
    ) -> None:
        self.matcher, self.context = matcher, context
        self._memory, self._ops = memory, ops
        self._replies: dict[int, RmaReply] = {}
        self._serial = 0
        self._failed: dict[int, str] = {}
        self._holders: list[tuple[int, bool]] = []
        """(rank, whether its lock is exclusive)."""
        self._queue: deque[tuple[int, int, bool]] = deque()
        self.posted: dict[int, int] = {}
        self.completed: dict[int, int] = {}
        matcher.handle(context, self._handle)

    def close(self) -> None:
        """Stop handling requests."""
        self.matcher.handle(self.context, None)

    # -- sending ------------------------------------------------------------------------------------------------------

    def request(self, target: int, what: int, body: bytes, about: str) -> RmaReply:
        """Send a request with a reply."""
        reply = RmaReply(target, about)
        self._serial = serial = self._serial + 1
        self._replies[serial] = reply
        self.matcher.active(target, self.context, what, serial, body)
        return reply

    def notify(self, target: int, what: int, body: bytes = b"") -> None:
        """Send a request without a reply."""
        self.matcher.active(target, self.context, what, 0, body)

    # -- handling requests --------------------------------------------------------------------------------------------

    def _handle(self, src: int, tag: int, serial: int, body: memoryview) -> None:
        if tag in (ANSWER, FAILED):
            reply = self._replies.pop(serial)
            reply.data, reply.failed, reply.done = bytes(body), tag == FAILED, True
        elif tag == POST:
            self.posted[src] = self.posted.get(src, 0) + 1
        elif tag == COMPLETE:
            self.completed[src] = self.completed.get(src, 0) + 1
        elif tag == LOCK:
            self._queue.append((src, serial, bool(body[0])))
            self._grant()
        elif tag == UNLOCK:
            self._holders = [h for h in self._holders if h[0] != src]
            self._reply(src, serial, b"")
            self._grant()
        elif tag == FLUSH:
            self._reply(src, serial, b"")
        else:
            try:
                result = self._move(tag, body)
            except (ValueError, IndexError) as e:
                self._failed.setdefault(src, str(e))
                result = b""
            if serial:
                self._reply(src, serial, result)

    def _reply(self, src: int, serial: int, data: bytes) -> None:
        failure = self._failed.pop(src, None)
        tag, body = (ANSWER, data) if failure is None else (FAILED, failure.encode())
        self.matcher.answer(src, self.context, tag, serial, body)

    def _grant(self) -> None:
        """Grant locks in the order of requests: one exclusive lock, or several shared ones."""
        while self._queue:
            src, serial, exclusive = self._queue[0]
            if self._holders and (exclusive or any(holder[1] for holder in self._holders)):
                return
            self._queue.popleft()
            self._holders.append((src, exclusive))
            self._reply(src, serial, b"")

    def _move(self, tag: int, body: memoryview) -> bytes:
        """Execute a Put, Get, Accumulate or swap; returns the old values if requested."""
        code, fetch, kind, n = _HEAD.unpack_from(body)
        start = _HEAD.size + 16 * n
        blocks = np.frombuffer(body[_HEAD.size : start], dtype=np.int64).reshape(n, 2).tolist()
        places = [self._memory(offset, length) for offset, length in blocks]
        data = body[start:]
        if tag == PUT:
            _scatter(data, places)
            return b""
        old = b"".join(places)
        if tag == ACCUMULATE:
            new = bytearray(old)
            if _OPS[code] == "REPLACE":
                new[:] = data
            elif _OPS[code] != "NO_OP":
                operand = bytearray(data)
                combine(self._ops[_OPS[code]], TYPES[_NAMES[kind]])(memoryview(operand), memoryview(new))
            _scatter(memoryview(new), places)
        elif tag == SWAP and data[: len(old)] == old:
            _scatter(data[len(old) :], places)
        return old if fetch or tag in (GET, SWAP) else b""


def _scatter(data: memoryview, places: list[memoryview]) -> None:
    at = 0
    for place in places:
        place[:] = data[at : at + len(place)]
        at += len(place)


def check_range(memory: memoryview, offset: int, length: int, what: str) -> memoryview:
    """A range of memory; raises ValueError if it is outside."""
    if offset < 0 or offset + length > len(memory):
        raise ValueError(f"bytes {offset} to {offset + length} of a window of {len(memory)} on {what}")
    return memory[offset : offset + length]
