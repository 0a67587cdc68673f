"""A post office over MPI, through mpi4py: frames of a head and a body, in order from each sender.

A small frame is one message: the length of its head, the head, the body. A long one is a message with the size of the
body in place of it, and the body follows by itself, straight from the sender's memory into the receiver's.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

from ...core.errors import GaveUp
from ..mail.post import Outgoing, Post
from .world import load, until, world

EAGER = 16 << 10
"""Bodies up to this size travel in the message of their head."""
_PIECE = 1 << 30
"""The longest single message."""
_HEADS, _BODIES = 1, 2
"""MPI's tags: a body never meets a receive for a head."""
_FRAME = struct.Struct("<IQ")
"""Length of the head, and the size of a body that follows by itself, or all ones for one that is here."""
_HERE = (1 << 64) - 1


class _Sent:
    """A frame on its way out: its requests, and what MPI still reads."""

    def __init__(self, requests: list[Any], keep: object, *, done: bool) -> None:
        self.requests, self.keep, self.done = requests, keep, done


class _Arriving:
    """A long body on its way in."""

    def __init__(self, requests: list[Any], head: bytes, body: memoryview) -> None:
        self.requests, self.head, self.body = requests, head, body


class MpiPost(Post):
    """The post office of one rank of an mpi4py communicator (default: all of mpiexec's). All make it together."""

    def __init__(self, comm: Any = None) -> None:
        self._mpi = load()
        self._comm = (world() if comm is None else comm).Dup()
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        self._status = self._mpi.Status()
        self._leaving: list[_Sent] = []
        self._arriving: dict[int, _Arriving] = {}
        self._behind: dict[int, deque[bytearray]] = {}
        """By sender: messages that came while a long body before them is still on its way."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return int(self._rank)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return int(self._size)

    def put(self, dst: int, head: bytes, body: memoryview) -> Outgoing:
        """Start to send a frame; a small body is copied and done at once."""
        byte = self._mpi.BYTE
        size = body.nbytes
        if size <= EAGER:
            message = b"".join((_FRAME.pack(len(head), _HERE), head, body))
            sent = _Sent([self._comm.Isend([message, byte], dst, _HEADS)], message, done=True)
        else:
            message = _FRAME.pack(len(head), size) + head
            requests = [self._comm.Isend([message, byte], dst, _HEADS)]
            requests += [self._comm.Isend([piece, byte], dst, _BODIES) for piece in _pieces(body)]
            sent = _Sent(requests, (message, body), done=False)
        self._leaving.append(sent)
        return sent

    def progress(self, timeout: float) -> bool:
        """Move what can be moved; if nothing can, poll with pauses until something can or the time is up."""
        try:
            return self._move() or (timeout > 0 and until(self._move, timeout))
        except self._mpi.Exception as e:
            raise GaveUp(f"rank {self._rank} cannot exchange messages", rule=e.Get_error_string()) from e

    def close(self) -> None:
        """Wait a moment for what still leaves; the communicator ends with MPI, because freeing it needs everyone."""
        until(self._all_left, 1.0)

    def _all_left(self) -> bool:
        self._flush()
        return not self._leaving

    def _move(self) -> bool:
        moved = self._flush()
        for src, one in list(self._arriving.items()):
            if self._mpi.Request.Testall(one.requests):
                del self._arriving[src]
                self.desk.end(src, one.head, one.body)
                self._catch_up(src)
                moved = True
        while self._mpi_message():
            moved = True
        return moved

    def _flush(self) -> bool:
        """Note what has left; whether a frame is done that was not before."""
        if not self._leaving:
            return False
        still, moved = [], False
        for sent in self._leaving:
            if self._mpi.Request.Testall(sent.requests):
                moved = moved or not sent.done
                sent.done, sent.keep = True, None
            else:
                still.append(sent)
        self._leaving = still
        return moved

    def _mpi_message(self) -> bool:
        """Take one message that is there, if any."""
        mpi = self._mpi
        found = self._comm.Improbe(mpi.ANY_SOURCE, _HEADS, self._status)
        if found is None:
            return False
        src = self._status.Get_source()
        message = bytearray(self._status.Get_count(mpi.BYTE))
        found.Recv([message, mpi.BYTE])
        if src in self._arriving:
            self._behind.setdefault(src, deque()).append(message)
        else:
            self._take(src, message)
        return True

    def _take(self, src: int, message: bytearray) -> None:
        """Hand a small frame over, or begin to receive a long body."""
        length, size = _FRAME.unpack_from(message)
        start = _FRAME.size + length
        head = bytes(message[_FRAME.size : start])
        if size == _HERE:
            body = self.desk.begin(src, head, len(message) - start)
            body.cast("B")[:] = memoryview(message)[start:]
            self.desk.end(src, head, body)
            return
        body = self.desk.begin(src, head, size)
        requests = [self._comm.Irecv([piece, self._mpi.BYTE], src, _BODIES) for piece in _pieces(body)]
        self._arriving[src] = _Arriving(requests, head, body)

    def _catch_up(self, src: int) -> None:
        """The messages that came behind a long body, until the next long body."""
        waiting = self._behind.get(src)
        while waiting and src not in self._arriving:
            self._take(src, waiting.popleft())


def _pieces(body: memoryview) -> list[memoryview]:
    """A body in pieces that MPI can count."""
    data = body.cast("B")
    return [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
