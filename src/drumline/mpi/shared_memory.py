"""Memory that all ranks of a host map: the parts of the ranks lie one after another in an anonymous file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate

from ..comm.hosts import host_digest
from . import constants as C
from .byte_buffer import buffer
from .comm import Comm
from .exception import MPIError


class SharedMemory:
    """The parts of all ranks, in one mapping of this rank."""

    def __init__(self, comm: Comm, sizes: Sequence[int]) -> None:
        """Make it on rank 0 and open it on the others; all ranks of `comm` call it."""
        self.sizes = list(sizes)
        self._starts = [0, *accumulate(sizes)]
        total = max(1, self._starts[-1])
        fd, problem = _make(total) if comm.rank == 0 else (-1, "")
        place = comm.bcast((os.getpid(), fd, host_digest(), problem))
        if comm.rank != 0 and not place[3]:
            fd, problem = _open(*place[:3])
        try:  # every rank learns of the first problem; none closes the file before all have opened it
            problems = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(problem)) if text]
            if problems:
                raise MPIError(
                    C.ERR_RMA_SHARED,
                    f"no shared memory: {problems[0]}",
                    rule="all ranks of the window are on one host",
                    fix="Split_type(COMM_TYPE_SHARED), or Allocate with Put and Get",
                )
            self._memory = memoryview(mmap.mmap(fd, total))
        finally:
            if fd >= 0:
                os.close(fd)

    def part(self, rank: int) -> buffer:
        """The memory of one rank."""
        return buffer.frombuffer(self._memory[self._starts[rank] : self._starts[rank + 1]])

    def first_part(self) -> int:
        """The lowest rank that has memory."""
        return next((rank for rank, size in enumerate(self.sizes) if size), 0)


def _make(total: int) -> tuple[int, str]:
    try:
        fd = os.memfd_create("drumline", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as e:
        return -1, f"this system has no anonymous shared memory: {e}"
    try:
        os.posix_fallocate(fd, 0, total)  # better an error now than SIGBUS later
    except OSError as e:
        os.close(fd)
        return -1, f"{total} bytes: {e.strerror}"
    return fd, ""


def _open(pid: int, fd: int, host: bytes) -> tuple[int, str]:
    if host != host_digest():
        return -1, "it is on another host than rank 0"
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), ""
    except OSError as e:
        return -1, f"it cannot open the memory of rank 0: {e.strerror}"
