"""A post office over torch.distributed with gloo: for ranks on several hosts, or where there is no shared memory.

A frame is one message of fixed size with its head and, if it is small, its body; a long body follows by itself. A
thread for each peer listens for its heads: so the peer that dies is known by its number, which a receive from anyone
does not tell. One more thread sees to it that what was sent stays alive until it has left.
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
from .post import Outgoing, Post

_CARD = 512
"""Bytes of the message that every frame begins with."""
_HEAD = struct.Struct("<HQ")
"""Length of the head (or _GOODBYE), and size of the body."""
_GOODBYE = 0xFFFF
_HEADS, _BODIES = 1, 2
"""Gloo's tags: a body never meets a receive for a head."""
_FOREVER = timedelta(days=365)
"""A rank may compute for long; who waits in vain is told by `matching`, not by a clock."""
_LOAN = 256 << 20
"""Bytes of long bodies that are copied ahead; beyond it the sender waits until its own memory has left."""


class _Sent:
    """A frame on its way out."""

    __slots__ = ("done", "dst", "keep", "nbytes", "works")

    def __init__(
        self, dst: int, works: list[dist.Work], keep: tuple[torch.Tensor, ...], nbytes: int, *, done: bool
    ) -> None:
        self.dst, self.works, self.keep, self.nbytes, self.done = dst, works, keep, nbytes, done


class GlooPost(Post):
    """The post office of one process of a torch group. All ranks make it together: it makes a gloo group of its own."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised", fix="call drumline.comm.environment.connect() first"
            )
        group = dist.new_group(backend="gloo", timeout=_FOREVER)
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._cards: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._leaving: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._lent = self._returned = 0  # one is counted up by whoever puts, one by the thread that sees off
        self._parted: set[int] = set()
        self._lost: dict[int, str] = {}
        self._threads = [threading.Thread(target=self._see_off, name="gloo post, out", daemon=True)]
        for src in range(self._size):
            if src != self._rank:
                name = f"gloo post, from rank {src}"
                self._threads.append(threading.Thread(target=self._listen, args=(src,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._size

    def put(self, dst: int, head: bytes, body: memoryview) -> Outgoing:
        """Send a card; a long body follows from a copy, or from where it is when much is under way."""
        nbytes = body.nbytes
        card = bytearray(_CARD)
        start = _HEAD.size + len(head)
        assert start <= _CARD, "a head is short"
        _HEAD.pack_into(card, 0, len(head), nbytes)
        card[_HEAD.size : start] = head
        small = start + nbytes <= _CARD
        if small:
            card[start : start + nbytes] = body
        if dst == self._rank:
            card_bytes = bytes(card) if small else bytes(card[:start]) + bytes(body)
            self._cards.put((dst, card_bytes))
            return _Sent(dst, [], (), 0, done=True)
        first = torch.frombuffer(card, dtype=torch.uint8)
        try:
            works = [self._group.send([first], dst, _HEADS)]
            if small:
                sent = _Sent(dst, works, (first,), 0, done=True)
            else:
                lend = self._lent - self._returned + nbytes <= _LOAN
                long = torch.frombuffer(bytearray(body) if lend else body, dtype=torch.uint8)
                works.append(self._group.send([long], dst, _BODIES))
                sent = _Sent(dst, works, (first, long), nbytes if lend else 0, done=lend)
                self._lent += sent.nbytes
        except RuntimeError as e:
            raise self._gave_up(dst, e) from e
        self._leaving.put(sent)
        return sent

    def progress(self, timeout: float) -> bool:
        """Take the cards that have come; a body that follows one is received here, where it is wanted."""
        try:
            src, card = self._cards.get(timeout=timeout) if timeout > 0 else self._cards.get_nowait()
        except queue.Empty:
            for rank, reason in self._lost.items():
                raise GaveUp(f"rank {self._rank} lost rank {rank}", rule=reason) from None
            return False
        while True:
            self._take(src, card)
            try:
                src, card = self._cards.get_nowait()
            except queue.Empty:
                return True

    def gone(self, rank: int) -> str:
        """Whether the connection to that rank is broken."""
        return "has died" if rank in self._lost else ""

    def close(self) -> None:
        """Say goodbye, and stay until everyone has: gloo tears down the connections of those who still talk."""
        card = bytearray(_CARD)
        _HEAD.pack_into(card, 0, _GOODBYE, 0)
        tensor = torch.frombuffer(card, dtype=torch.uint8)
        for dst in range(self._size):
            if dst != self._rank and dst not in self._lost:
                try:
                    works = [self._group.send([tensor], dst, _HEADS)]
                except RuntimeError as e:
                    self._gave_up(dst, e)
                else:
                    self._leaving.put(_Sent(dst, works, (tensor,), 0, done=True))
        while len(self._parted | self._lost.keys()) < self._size - 1:
            time.sleep(0.002)
        self._leaving.put(None)
        for thread in self._threads:
            thread.join()
        if dist.is_initialized():  # else the world has ended, and its groups with it
            dist.destroy_process_group(self._group)
        del self._group  # or its threads live on

    def _take(self, src: int, card: bytes) -> None:
        length, nbytes = _HEAD.unpack_from(card)
        start = _HEAD.size + length
        head = card[_HEAD.size : start]
        into = self.desk.begin(src, head, nbytes)
        if len(card) - start >= nbytes:
            into[:] = memoryview(card)[start : start + nbytes]
        else:
            try:
                self._group.recv([torch.frombuffer(into, dtype=torch.uint8)], src, _BODIES).wait()
            except RuntimeError as e:
                raise self._gave_up(src, e) from e
        self.desk.end(src, head, into)

    def _gave_up(self, rank: int, e: RuntimeError) -> GaveUp:
        reason = str(e).splitlines()[0].partition("] ")[2] or str(e).splitlines()[0]
        self._lost.setdefault(rank, reason)
        return GaveUp(f"rank {self._rank} lost rank {rank}", rule=reason)

    def _listen(self, src: int) -> None:
        """One thread: heads from one peer, until it says goodbye or its connection breaks."""
        card = torch.empty(_CARD, dtype=torch.uint8)
        try:
            while True:
                self._group.recv([card], src, _HEADS).wait()
                data = card.numpy().tobytes()
                if _HEAD.unpack_from(data)[0] == _GOODBYE:
                    self._parted.add(src)
                    return
                self._cards.put((src, data))
        except RuntimeError as e:
            self._gave_up(src, e)

    def _see_off(self) -> None:
        """One thread: wait for what was sent, in the order of sending."""
        while (sent := self._leaving.get()) is not None:
            try:
                for work in sent.works:
                    work.wait()
            except RuntimeError as e:
                self._gave_up(sent.dst, e)
            self._returned += sent.nbytes
            sent.done, sent.keep = True, ()
