"""The target's side of one-sided communication: what others ask of this rank's memory, done while it makes progress.

A request is an active message: its tag says what to do, its body which bytes. Those of one sender are done in order, so
an answer to the last one says that all before it are done.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..comm.mail.matching import Matching
from .op import Op, combine
from .types import TYPES

PUT, GET, ACCUMULATE, SWAP, FLUSH, LOCK, UNLOCK, POST, COMPLETE, ANSWER, FAILED = range(11)
_HEAD = struct.Struct("<BBHI")
"""Operator, whether the old values are wanted, datatype, how many blocks of bytes."""
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


class Answer:
    """What this rank waits for from a target."""

    def __init__(self, target: int, what: str) -> None:
        self.peers: Sequence[int] = (target,)
        self.done = False
        self.data = b""
        self.failed = False
        self._what = what

    def about(self) -> str:
        """What it is."""
        return f"{self._what} rank {self.peers[0]}"


class Counter:
    """Ranks of which something has been heard: for Start and Wait."""

    def __init__(self, ranks: Sequence[int], heard: dict[int, int], what: str) -> None:
        self.ranks, self.heard, self._what = ranks, heard, what

    @property
    def peers(self) -> Sequence[int]:
        """Who has not been heard of."""
        return [r for r in self.ranks if not self.heard.get(r)]

    @property
    def done(self) -> bool:
        """Whether all have."""
        return not self.peers

    def about(self) -> str:
        """What it is."""
        return f"{self._what} ranks {list(self.peers)}"

    def take(self) -> None:
        """Count each once."""
        for rank in self.ranks:
            self.heard[rank] -= 1


def describe(blocks: Blocks, op: str = "NO_OP", kind: str = "BYTE", *, fetch: bool = False) -> bytes:
    """The head of a request."""
    flat = np.array(blocks, dtype=np.int64).reshape(-1)
    return _HEAD.pack(_OPS.index(op), fetch, _NAMES.index(kind), len(blocks)) + flat.tobytes()


class Window:
    """This rank's memory, and what others do with it."""

    def __init__(
        self, matching: Matching, context: int, memory: Callable[[int, int], memoryview], ops: dict[str, Op]
    ) -> None:
        self.matching, self.context = matching, context
        self._memory, self._ops = memory, ops
        self._answers: dict[int, Answer] = {}
        self._serial = 0
        self._failed: dict[int, str] = {}
        self._holders: list[tuple[int, bool]] = []
        """(rank, whether it wants nobody beside it)."""
        self._queue: deque[tuple[int, int, bool]] = deque()
        self.posted: dict[int, int] = {}
        self.completed: dict[int, int] = {}
        matching.handle(context, self._handle)

    def close(self) -> None:
        """Nobody asks any more."""
        self.matching.handle(self.context, None)

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask(self, target: int, what: int, body: bytes, about: str) -> Answer:
        """Send a request that is answered."""
        answer = Answer(target, about)
        self._serial = serial = self._serial + 1
        self._answers[serial] = answer
        self.matching.active(target, self.context, what, serial, body)
        return answer

    def tell(self, target: int, what: int, body: bytes = b"") -> None:
        """Send a request that is not."""
        self.matching.active(target, self.context, what, 0, body)

    # -- being asked ------------------------------------------------------------------------------------------------

    def _handle(self, src: int, tag: int, serial: int, body: memoryview) -> None:
        if tag in (ANSWER, FAILED):
            answer = self._answers.pop(serial)
            answer.data, answer.failed, answer.done = bytes(body), tag == FAILED, True
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
        self.matching.answer(src, self.context, tag, serial, body)

    def _grant(self) -> None:
        """Locks in the order of asking: alone, or together with others that share."""
        while self._queue:
            src, serial, alone = self._queue[0]
            if self._holders and (alone or any(holder[1] for holder in self._holders)):
                return
            self._queue.popleft()
            self._holders.append((src, alone))
            self._reply(src, serial, b"")

    def _move(self, tag: int, body: memoryview) -> bytes:
        """Put, Get, Accumulate or swap; the old values where they are wanted."""
        code, fetch, kind, n = _HEAD.unpack_from(body)
        start = _HEAD.size + 16 * n
        blocks = np.frombuffer(body[_HEAD.size : start], dtype=np.int64).reshape(n, 2).tolist()
        places = [self._memory(offset, length) for offset, length in blocks]
        data = body[start:]
        if tag == PUT:
            _spread(data, places)
            return b""
        old = b"".join(places)
        if tag == ACCUMULATE:
            new = bytearray(old)
            if _OPS[code] == "REPLACE":
                new[:] = data
            elif _OPS[code] != "NO_OP":
                operand = bytearray(data)
                combine(self._ops[_OPS[code]], TYPES[_NAMES[kind]])(memoryview(operand), memoryview(new))
            _spread(memoryview(new), places)
        elif tag == SWAP and data[: len(old)] == old:
            _spread(data[len(old) :], places)
        return old if fetch or tag in (GET, SWAP) else b""


def _spread(data: memoryview, places: list[memoryview]) -> None:
    at = 0
    for place in places:
        place[:] = data[at : at + len(place)]
        at += len(place)


def check_range(memory: memoryview, offset: int, length: int, what: str) -> memoryview:
    """A stretch of memory, or why there is none."""
    if offset < 0 or offset + length > len(memory):
        raise ValueError(f"bytes {offset} to {offset + length} of a window of {len(memory)} on {what}")
    return memory[offset : offset + length]
