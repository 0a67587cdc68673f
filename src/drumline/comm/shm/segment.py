"""The shared memory of a group: created by rank 0, opened by the others, freed with the last process.

It has no name in a file system. Rank 0 creates an anonymous file and publishes its descriptor in the store; the others
open it through /proc. So nothing is left behind, however the ranks end, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ...core.errors import GaveUp, InputError
from ..hosts import host_id
from ..signed_store import SignedStore
from . import native

SMALL = 16 << 10
"""Bytes up to which a buffer goes through a mailbox: one wait instead of two per step."""
SLOT = 64 << 10
"""Bytes of a staging slot: small enough that the slots of all ranks stay in cache."""
SLOTS = 4
"""Slots per rank, as in core.c."""
MOST = 512
"""The most ranks of a group: their process ids are on the first page."""
BOARD = 1024
"""Bytes of a rank's board: text for the others to read."""
_LINE = 64
_PAGE = 4096
CONTROL = 7 * _LINE
"""Bytes of `Control` in core.c."""
RING = 2 * _LINE
"""Bytes of `Ring` in core.c, without its data."""


class NoSharedMemory(Exception):
    """The reason why this group has no shared memory, for the warning of the fallback."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Offsets in the shared memory, in bytes."""

    p: int
    ring: int
    """Bytes of one ring's data, a power of two."""
    board_at: int
    control_at: int
    small_at: int
    in_at: int
    out_at: int
    ring_at: int
    total: int

    @classmethod
    def of(cls, p: int) -> SegmentLayout:
        """The layout for p ranks: there are p*p rings, so they are shorter if there are many."""
        ring = 1 << 18
        while ring > 1 << 13 and ring * p > 1 << 20:
            ring //= 2
        board_at = _PAGE
        control_at = _up(board_at + p * BOARD)
        small_at = _up(control_at + p * CONTROL)
        in_at = _up(small_at + p * 2 * SMALL)
        out_at = _up(in_at + p * SLOTS * SLOT)
        ring_at = _up(out_at + p * SLOTS * SLOT)
        return cls(p, ring, board_at, control_at, small_at, in_at, out_at, ring_at, ring_at + p * p * (RING + ring))


class SharedSegment:
    """The shared memory of a group, as mapped by one rank."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        if size > MOST:
            raise NoSharedMemory(f"{size} ranks in one group: at most {MOST} share memory")
        self.rank, self.size, self.layout = rank, size, SegmentLayout.of(size)
        self.compiled = False
        """Whether the ranks use the native core: rank 0 decides for all."""
        fd = self._make(store, timeout) if rank == 0 else self._open(store, timeout)
        self.memory = mmap.mmap(fd, self.layout.total)
        # Kept as long as addresses are computed from it; mmap refuses to close before.
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self.memory)
        self.base = ctypes.addressof(self._anchor)
        self._pids = memoryview(self.memory)[_LINE : _LINE + 4 * MOST].cast("I")
        self._pids[rank] = os.getpid()
        store.add("joined", 1)
        if rank == 0:
            self._wait_for_all(store, timeout)
        os.close(fd)

    def _make(self, store: dist.Store, timeout: float) -> int:
        try:
            fd = os.memfd_create("drumline", os.MFD_CLOEXEC)
        except (OSError, AttributeError) as e:
            SignedStore(store).set("segment", json.dumps({"problem": f"no anonymous shared memory here: {e}"}))
            raise NoSharedMemory(f"no anonymous shared memory here: {e}") from None
        try:
            # All but the rings is always used: better an error now than SIGBUS later.
            os.posix_fallocate(fd, 0, self.layout.ring_at)
            os.ftruncate(fd, self.layout.total)
        except OSError as e:
            os.close(fd)
            problem = f"{self.layout.total >> 10} KiB of shared memory for {self.size} ranks: {e.strerror}"
            SignedStore(store).set("segment", json.dumps({"problem": problem}))
            raise NoSharedMemory(problem) from None
        place = {
            "pid": os.getpid(),
            "fd": fd,
            "host": host_id(),
            "nonce": secrets.token_hex(16),
            "compiled": self._compiled(),
        }
        self.compiled = bool(place["compiled"])
        os.pwrite(fd, str(place["nonce"]).encode(), 0)
        SignedStore(store).set("segment", json.dumps(place))
        return fd

    def _open(self, store: dist.Store, timeout: float) -> int:
        try:
            store.wait(["segment"], timedelta(seconds=timeout))
            place = json.loads(SignedStore(store).get("segment"))
        except RuntimeError as e:
            raise GaveUp(f"rank {self.rank} waited {timeout:g} s for rank 0 to make shared memory") from e
        if "problem" in place:
            raise NoSharedMemory(place["problem"])
        if place["host"] != host_id():
            raise InputError(
                f"rank {self.rank} is on another host than rank 0",
                rule="shm joins processes that share a host, its process numbers and its network",
                fix="backend gloo between hosts; drumline.comm.HostTransport uses both",
            )
        try:
            fd = os.open(f"/proc/{place['pid']}/fd/{place['fd']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise GaveUp(f"rank {self.rank} cannot open the shared memory of rank 0", rule=str(e)) from None
        if os.pread(fd, 32, 0) != place["nonce"].encode():
            raise GaveUp(f"rank {self.rank} opened another group's shared memory", rule="the nonce differs")
        self.compiled = bool(place["compiled"])
        if self.compiled and not self._compiled():
            raise GaveUp(
                f"rank {self.rank} cannot load the compiled core that rank 0 has",
                fix="DRUMLINE_NATIVE=0 on all ranks: none uses it",
            )
        return fd

    @staticmethod
    def _compiled() -> bool:
        try:
            native.load()
        except native.NativeUnavailable:
            return False
        return True

    def _wait_for_all(self, store: dist.Store, timeout: float) -> None:
        """Rank 0 keeps the file open until all ranks have opened it."""
        end = time.monotonic() + timeout
        while store.add("joined", 0) < self.size:
            if time.monotonic() > end:
                missing = [r for r in range(self.size) if self._pids[r] == 0]
                raise GaveUp(f"ranks {missing} did not join the shared memory within {timeout:g} s")
            time.sleep(0.001)

    def write(self, text: str) -> None:
        """Write text to this rank's board, cut to its size."""
        data = text.encode()[: BOARD - 1] + b"\0"
        at = self.layout.board_at + self.rank * BOARD
        self.memory[at : at + len(data)] = data

    def read(self, rank: int) -> str:
        """The text on a rank's board."""
        at = self.layout.board_at + rank * BOARD
        return self.memory[at : at + BOARD].split(b"\0", 1)[0].decode(errors="replace")

    def state(self, rank: int) -> str:
        """`alive`, `left` (it closed the memory) or `dead`."""
        pid = self._pids[rank]
        if pid == 0:
            return "alive"  # it has not joined yet
        if pid == _LEFT:
            return "left"
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except FileNotFoundError:
            return "dead"
        except OSError:
            return "alive"
        # A killed process has an entry until its parent waits for it.
        return "dead" if stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] in b"ZX" else "alive"

    def close(self) -> None:
        """Mark this rank as left and unmap the memory."""
        if self._anchor is None:
            return
        self._pids[self.rank] = _LEFT
        self._pids.release()
        self._anchor = None
        with contextlib.suppress(BufferError):  # still referenced by a view: freed with the process
            self.memory.close()


_LEFT = 0xFFFFFFFF


def _up(n: int) -> int:
    return -(-n // _PAGE) * _PAGE
