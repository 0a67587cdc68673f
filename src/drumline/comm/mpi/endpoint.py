"""An endpoint over MPI, through mpi4py: frames of a head and a body, in order from each sender.

A small frame is one message: the length of its head, the head, the body. A long one is a message with the body's size,
followed by the body itself, directly from the sender's memory into the receiver's.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

from ...core.errors import GaveUp
from ..messaging.endpoint import Endpoint, OutgoingFrame
from .world import load, until, world

EAGER = 16 << 10
"""Bodies up to this size are sent with their head."""
_PIECE = 1 << 30
"""Bytes of the longest single message."""
_HEADS, _BODIES = 1, 2
"""MPI's tags: a body never matches a receive for a head."""
_FRAME = struct.Struct("<IQ")
"""Length of the head, and the size of a body that follows separately; all ones if the body is included."""
_INCLUDED = (1 << 64) - 1


class _MpiFrame:
    """A frame being sent: its requests, and the memory that MPI still reads."""

    def __init__(self, requests: list[Any], keep: object, *, done: bool) -> None:
        self.requests, self.keep, self.done = requests, keep, done


class _IncomingBody:
    """A long body being received."""

    def __init__(self, requests: list[Any], head: bytes, body: memoryview) -> None:
        self.requests, self.head, self.body = requests, head, body


class MpiEndpoint(Endpoint):
    """The endpoint of one rank of an mpi4py communicator (default: all of mpiexec's). All ranks make it together."""

    def __init__(self, comm: Any = None) -> None:
        self._mpi = load()
        self._comm = (world() if comm is None else comm).Dup()
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        self._status = self._mpi.Status()
        self._sending: list[_MpiFrame] = []
        self._receiving: dict[int, _IncomingBody] = {}
        self._deferred: dict[int, deque[bytearray]] = {}
        """By sender: messages that arrived while an earlier long body is still being received."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return int(self._rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._size)

    def put(self, dst: int, head: bytes, body: memoryview) -> OutgoingFrame:
        """Start to send a frame; a small body is copied and complete at once."""
        byte = self._mpi.BYTE
        size = body.nbytes
        if size <= EAGER:
            message = b"".join((_FRAME.pack(len(head), _INCLUDED), head, body))
            sent = _MpiFrame([self._comm.Isend([message, byte], dst, _HEADS)], message, done=True)
        else:
            message = _FRAME.pack(len(head), size) + head
            requests = [self._comm.Isend([message, byte], dst, _HEADS)]
            requests += [self._comm.Isend([piece, byte], dst, _BODIES) for piece in _pieces(body)]
            sent = _MpiFrame(requests, (message, body), done=False)
        self._sending.append(sent)
        return sent

    def progress(self, timeout: float) -> bool:
        """Send and receive what is ready; otherwise poll with pauses until something is or the time is up."""
        try:
            return self._move() or (timeout > 0 and until(self._move, timeout))
        except self._mpi.Exception as e:
            raise GaveUp(f"rank {self._rank} cannot exchange messages", rule=e.Get_error_string()) from e

    def close(self) -> None:
        """Wait briefly for unfinished sends; the communicator ends with MPI, because freeing it needs all ranks."""
        until(self._all_sent, 1.0)

    def _all_sent(self) -> bool:
        self._flush()
        return not self._sending

    def _move(self) -> bool:
        moved = self._flush()
        for src, incoming in list(self._receiving.items()):
            if self._mpi.Request.Testall(incoming.requests):
                del self._receiving[src]
                self.receiver.end(src, incoming.head, incoming.body)
                self._process_deferred(src)
                moved = True
        while self._receive_one():
            moved = True
        return moved

    def _flush(self) -> bool:
        """Test the sends; returns whether a frame became complete."""
        if not self._sending:
            return False
        still, moved = [], False
        for sent in self._sending:
            if self._mpi.Request.Testall(sent.requests):
                moved = moved or not sent.done
                sent.done, sent.keep = True, None
            else:
                still.append(sent)
        self._sending = still
        return moved

    def _receive_one(self) -> bool:
        """Receive one message, if there is any."""
        mpi = self._mpi
        matched = self._comm.Improbe(mpi.ANY_SOURCE, _HEADS, self._status)
        if matched is None:
            return False
        src = self._status.Get_source()
        message = bytearray(self._status.Get_count(mpi.BYTE))
        matched.Recv([message, mpi.BYTE])
        if src in self._receiving:
            self._deferred.setdefault(src, deque()).append(message)
        else:
            self._take(src, message)
        return True

    def _take(self, src: int, message: bytearray) -> None:
        """Deliver a small frame, or start to receive a long body."""
        length, size = _FRAME.unpack_from(message)
        start = _FRAME.size + length
        head = bytes(message[_FRAME.size : start])
        if size == _INCLUDED:
            body = self.receiver.begin(src, head, len(message) - start)
            body.cast("B")[:] = memoryview(message)[start:]
            self.receiver.end(src, head, body)
            return
        body = self.receiver.begin(src, head, size)
        requests = [self._comm.Irecv([piece, self._mpi.BYTE], src, _BODIES) for piece in _pieces(body)]
        self._receiving[src] = _IncomingBody(requests, head, body)

    def _process_deferred(self, src: int) -> None:
        """Process deferred messages, up to the next long body."""
        waiting = self._deferred.get(src)
        while waiting and src not in self._receiving:
            self._take(src, waiting.popleft())


def _pieces(body: memoryview) -> list[memoryview]:
    """Split a body into pieces that MPI can count."""
    data = body.cast("B")
    return [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
