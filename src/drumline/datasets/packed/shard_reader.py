"""Reads byte ranges of the shards of a pack: many at once, in the order of the disk, each checked.

Shards are read with `pread`, not mapped: a file that shrinks or a disk that fails is an error with a name, not a signal
that ends the rank.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np

from ...core.errors import CorruptFile
from .layout import REPAIR, PackedShard

_MOST_OPEN = 256
"""Shards that are open at once."""
_AT_ONCE = 2**20
"""Bytes of one read that spans neighbouring samples, at most."""
_COLD_S = 100e-6
"""Seconds per read above which the disk, not the memory, is reading: then the next batch is asked for ahead."""


class ShardReader:
    """The shards of one pack, opened when they are first read. Each process opens its own."""

    def __init__(self, folder: Path, shards: tuple[PackedShard, ...]) -> None:
        self.folder, self.shards = folder, shards
        self._open: OrderedDict[int, int] = OrderedDict()
        self._process = os.getpid()
        self.is_cold = True
        """Whether the last reads had to wait for a disk."""

    def read(self, shard: np.ndarray, start: np.ndarray, length: np.ndarray, crc: np.ndarray) -> bytes:
        """The bytes of ranges that are sorted by (shard, start), one after the other, once their checksums agree."""
        ends = start + length
        breaks = (shard[1:] != shard[:-1]) | (start[1:] != ends[:-1])
        if not breaks.all():  # neighbours are read at once, up to a limit
            bucket = (np.cumsum(length) - length) // _AT_ONCE
            firsts = np.flatnonzero(np.concatenate([[True], breaks | (bucket[1:] != bucket[:-1])]))
            sizes = ends[np.append(firsts[1:], len(ends)) - 1] - start[firsts]
            runs = zip(shard[firsts].tolist(), start[firsts].tolist(), sizes.tolist(), strict=True)
        else:
            runs = zip(shard.tolist(), start.tolist(), length.tolist(), strict=True)
        began, reads, parts = time.perf_counter(), 0, []
        handle, opened = -1, -1
        for number, offset, size in runs:
            if number != opened:
                handle, opened = self._handle(number), number
            parts.append(self._pread(handle, number, offset, size))
            reads += 1
        self.is_cold = time.perf_counter() - began > _COLD_S * reads
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._check(data, shard, start, length, crc)
        return data

    def read_unchecked(self, shard: int, start: int, length: int) -> bytes:
        """The bytes of a range that was checked before."""
        return self._pread(self._handle(shard), shard, start, length)

    def prefetch(self, shard: np.ndarray, start: np.ndarray, length: np.ndarray) -> None:
        """Ask the operating system to read ranges ahead, without waiting."""
        for number, offset, size in zip(shard.tolist(), start.tolist(), length.tolist(), strict=True):
            os.posix_fadvise(self._handle(number), offset, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close all shards; they are opened again when they are read."""
        while self._open:
            _, handle = self._open.popitem()
            if self._process == os.getpid():
                os.close(handle)

    def _pread(self, handle: int, number: int, offset: int, size: int) -> bytes:
        try:
            data = os.pread(handle, size, offset)
            while len(data) < size and (more := os.pread(handle, size - len(data), offset + len(data))):
                data += more
        except (OSError, OverflowError) as e:
            reason = e.strerror if isinstance(e, OSError) else "its index points outside"
            raise self._damaged(number, f"it cannot be read at byte {offset}: {reason}") from None
        if len(data) < size:
            raise self._damaged(number, f"it ends at byte {offset + len(data)}, its index goes on to {offset + size}")
        return data

    def _check(self, data: bytes, shard: np.ndarray, start: np.ndarray, length: np.ndarray, crc: np.ndarray) -> None:
        view, at = memoryview(data), 0
        checksum = zlib.crc32
        for k, (size, expected) in enumerate(zip(length.tolist(), crc.tolist(), strict=True)):
            if checksum(view[at : at + size]) != expected:
                begin = int(start[k])
                raise self._damaged(int(shard[k]), f"bytes {begin} to {begin + size} differ from their checksum")
            at += size

    def _damaged(self, number: int, why: str) -> CorruptFile:
        path = self.folder / self.shards[number].file
        return CorruptFile(f"{path} is damaged", where=str(path), rule=why, fix=REPAIR)

    def _handle(self, number: int) -> int:
        """The open shard, once its size is checked."""
        if self._process != os.getpid():  # a fork: closing here would not hurt, but each process opens its own
            self._open, self._process = OrderedDict(), os.getpid()
        if (handle := self._open.get(number)) is not None:
            self._open.move_to_end(number)
            return handle
        if not 0 <= number < len(self.shards):
            raise CorruptFile(f"{self.folder / 'index.npy'} is damaged", rule=f"no shard {number}", fix=REPAIR)
        path, expected = self.folder / self.shards[number].file, self.shards[number].bytes
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CorruptFile(f"{path} is missing", where=str(path), fix=REPAIR) from None
        except OSError as e:
            raise CorruptFile(f"{path} cannot be read: {e.strerror}", where=str(path)) from None
        size = os.fstat(handle).st_size
        if size != expected:
            os.close(handle)
            raise CorruptFile(
                f"{path} is damaged",
                where=str(path),
                rule=f"it has {size} bytes, its index says {expected}",
                fix=REPAIR,
            )
        if len(self._open) >= _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[number] = handle
        return handle
