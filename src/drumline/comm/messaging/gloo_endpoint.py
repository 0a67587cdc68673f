"""An endpoint over torch.distributed with gloo: for ranks on several hosts, or without shared memory.

A frame is one message of fixed size with its head and, if it is small, its body; a long body follows separately. One
thread per peer listens for its heads, so that a dead peer is known by number, which a receive from any source does not
report. Another thread keeps sent tensors alive until they are sent.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ...core.errors import GaveUp, InputError
from .endpoint import Endpoint, OutgoingFrame

_HEADER_BYTES = 512
"""Bytes of the message that starts every frame."""
_HEAD = struct.Struct("<HQ")
"""Length of the head (or _GOODBYE), and size of the body."""
_GOODBYE = 0xFFFF
_HEADS, _BODIES = 1, 2
"""Gloo's tags: a body never matches a receive for a head."""
_FOREVER = timedelta(days=365)
"""Ranks may compute for long; the deadlock detector ends a wait, not a timeout."""
_COPY_LIMIT = 256 << 20
"""Bytes of long bodies that are copied; beyond it a send completes when its own memory is sent."""


class _GlooFrame:
    """A frame being sent."""

    __slots__ = ("done", "dst", "keep", "nbytes", "works")

    def __init__(
        self, dst: int, works: list[dist.Work], keep: tuple[torch.Tensor, ...], nbytes: int, *, done: bool
    ) -> None:
        self.dst, self.works, self.keep, self.nbytes, self.done = dst, works, keep, nbytes, done


class GlooEndpoint(Endpoint):
    """The endpoint of one process of a torch group. All ranks make it together: it makes its own gloo group."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised", fix="call drumline.comm.environment.connect() first"
            )
        group = dist.new_group(backend="gloo", timeout=_FOREVER)
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._headers: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._sending: queue.SimpleQueue[_GlooFrame | None] = queue.SimpleQueue()
        self._copied = self._freed = 0  # bytes; one is counted up by `put`, the other by the sending thread
        self._said_goodbye: set[int] = set()
        self._lost: dict[int, str] = {}
        self._threads = [threading.Thread(target=self._await_sends, name="gloo endpoint, out", daemon=True)]
        for src in range(self._size):
            if src != self._rank:
                name = f"gloo endpoint, from rank {src}"
                self._threads.append(threading.Thread(target=self._listen, args=(src,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    def put(self, dst: int, head: bytes, body: memoryview) -> OutgoingFrame:
        """Send the header; a long body follows from a copy, or from its own memory if many copies are in flight."""
        nbytes = body.nbytes
        header = bytearray(_HEADER_BYTES)
        start = _HEAD.size + len(head)
        assert start <= _HEADER_BYTES, "a head is short"
        _HEAD.pack_into(header, 0, len(head), nbytes)
        header[_HEAD.size : start] = head
        small = start + nbytes <= _HEADER_BYTES
        if small:
            header[start : start + nbytes] = body
        if dst == self._rank:
            header_bytes = bytes(header) if small else bytes(header[:start]) + bytes(body)
            self._headers.put((dst, header_bytes))
            return _GlooFrame(dst, [], (), 0, done=True)
        tensor = torch.frombuffer(header, dtype=torch.uint8)
        try:
            works = [self._group.send([tensor], dst, _HEADS)]
            if small:
                sent = _GlooFrame(dst, works, (tensor,), 0, done=True)
            else:
                copy = self._copied - self._freed + nbytes <= _COPY_LIMIT
                long = torch.frombuffer(bytearray(body) if copy else body, dtype=torch.uint8)
                works.append(self._group.send([long], dst, _BODIES))
                sent = _GlooFrame(dst, works, (tensor, long), nbytes if copy else 0, done=copy)
                self._copied += sent.nbytes
        except RuntimeError as e:
            raise self._gave_up(dst, e) from e
        self._sending.put(sent)
        return sent

    def progress(self, timeout: float) -> bool:
        """Process the headers that arrived; a long body is received here, into its final memory."""
        try:
            src, header = self._headers.get(timeout=timeout) if timeout > 0 else self._headers.get_nowait()
        except queue.Empty:
            for rank, reason in self._lost.items():
                raise GaveUp(f"rank {self._rank} lost rank {rank}", rule=reason) from None
            return False
        while True:
            self._take(src, header)
            try:
                src, header = self._headers.get_nowait()
            except queue.Empty:
                return True

    def gone(self, rank: int) -> str:
        """Report a broken connection to that rank."""
        return "has died" if rank in self._lost else ""

    def close(self) -> None:
        """Say goodbye, and wait until all ranks have: gloo would tear down connections in use."""
        header = bytearray(_HEADER_BYTES)
        _HEAD.pack_into(header, 0, _GOODBYE, 0)
        tensor = torch.frombuffer(header, dtype=torch.uint8)
        for dst in range(self._size):
            if dst != self._rank and dst not in self._lost:
                try:
                    works = [self._group.send([tensor], dst, _HEADS)]
                except RuntimeError as e:
                    self._gave_up(dst, e)
                else:
                    self._sending.put(_GlooFrame(dst, works, (tensor,), 0, done=True))
        while len(self._said_goodbye | self._lost.keys()) < self._size - 1:
            time.sleep(0.002)
        self._sending.put(None)
        for thread in self._threads:
            thread.join()
        if dist.is_initialized():  # else the world was destroyed, and its groups with it
            dist.destroy_process_group(self._group)
        del self._group  # or its threads stay alive

    def _take(self, src: int, header: bytes) -> None:
        length, nbytes = _HEAD.unpack_from(header)
        start = _HEAD.size + length
        head = header[_HEAD.size : start]
        into = self.receiver.begin(src, head, nbytes)
        if len(header) - start >= nbytes:
            into[:] = memoryview(header)[start : start + nbytes]
        else:
            try:
                self._group.recv([torch.frombuffer(into, dtype=torch.uint8)], src, _BODIES).wait()
            except RuntimeError as e:
                raise self._gave_up(src, e) from e
        self.receiver.end(src, head, into)

    def _gave_up(self, rank: int, e: RuntimeError) -> GaveUp:
        reason = str(e).splitlines()[0].partition("] ")[2] or str(e).splitlines()[0]
        self._lost.setdefault(rank, reason)
        return GaveUp(f"rank {self._rank} lost rank {rank}", rule=reason)

    def _listen(self, src: int) -> None:
        """Thread: receive heads from one peer, until it says goodbye or its connection breaks."""
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        try:
            while True:
                self._group.recv([header], src, _HEADS).wait()
                data = header.numpy().tobytes()
                if _HEAD.unpack_from(data)[0] == _GOODBYE:
                    self._said_goodbye.add(src)
                    return
                self._headers.put((src, data))
        except RuntimeError as e:
            self._gave_up(src, e)

    def _await_sends(self) -> None:
        """Thread: wait for sends, in order."""
        while (sent := self._sending.get()) is not None:
            try:
                for work in sent.works:
                    work.wait()
            except RuntimeError as e:
                self._gave_up(sent.dst, e)
            self._freed += sent.nbytes
            sent.done, sent.keep = True, ()
