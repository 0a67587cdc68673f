"""Reads byte ranges of the shards of a pack: many at once, in the order of the disk, each checked.

Shards are mapped into memory: thousands of small samples are copied by one call, where each read from a file would cost
more than its bytes. That a shard has its size is checked before each use, because a mapped file that shrinks would end
the process.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import CorruptFile
from .checksum import checksums
from .layout import REPAIR, PackedShard

_MOST_OPEN = 256
"""Shards that are open at once."""
_BLOCK = 512
"""Bytes of a block of a tar file."""
_MOST_TABLES = 8
"""Sizes of units that a shard remembers."""
_COLD_S = 200e-6
"""Seconds per sample above which a disk, not the memory, is reading: then the next batch is asked for ahead."""


@dataclass(frozen=True, slots=True)
class _OpenShard:
    """An open file, mapped into memory."""

    descriptor: int
    bytes: np.ndarray
    tables: dict[int, np.ndarray]
    """The same bytes as rows of one unit, by its size."""

    @classmethod
    def map(cls, handle: int, size: int) -> _OpenShard:
        memory = mmap.mmap(handle, size, prot=mmap.PROT_READ) if size else b""
        return cls(handle, np.frombuffer(memory, dtype=np.uint8), {})

    def table(self, unit: int) -> np.ndarray:
        """Rows of `unit` bytes, from the first byte on."""
        if unit not in self.tables:
            if len(self.tables) >= _MOST_TABLES:
                self.tables.clear()
            self.tables[unit] = self.bytes[: len(self.bytes) // unit * unit].reshape(-1, unit)
        return self.tables[unit]

    def close(self, *, own: bool) -> None:
        """Close the descriptor, if this process opened it; the mapping ends with its last user."""
        if own:
            os.close(self.descriptor)


class ShardReader:
    """The shards of one pack, opened when they are first read. Each process opens its own."""

    def __init__(self, folder: Path, shards: tuple[PackedShard, ...]) -> None:
        self.folder, self.shards = folder, shards
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._process = os.getpid()
        self._scratch = threading.local()
        self.is_cold = True
        """Whether the last reads had to wait for a disk."""

    def read(self, shard: np.ndarray, start: np.ndarray, length: np.ndarray, checksum: np.ndarray) -> np.ndarray:
        """The bytes of ranges that are sorted by (shard, start), one after the other, once their checksums agree.

        They lie in a buffer of this thread, which its next read uses again.
        """
        began = time.perf_counter()
        start, length = start.astype(np.int64), length.astype(np.int64)
        bounds = np.concatenate([[0], np.cumsum(length)])
        data = self._buffer(int(bounds[-1]))
        firsts = np.flatnonzero(np.concatenate([[True], shard[1:] != shard[:-1]]))
        parts = list(zip(firsts.tolist(), [*firsts[1:].tolist(), len(shard)], strict=True))
        ends = np.maximum.reduceat(start + length, firsts).tolist()
        if int(start.min()) < 0 or int(length.min()) < 0:
            raise self._damaged(int(shard[0]), "its index points before its first byte")
        mapped = [self._mapped(int(shard[first]), end) for (first, _), end in zip(parts, ends, strict=True)]
        unit = _unit(start, length)
        if unit:
            _copy_units(mapped, parts, start // unit, length // unit, data.reshape(-1, unit))
        else:
            for file, (first, last) in zip(mapped, parts, strict=True):
                for k in range(first, last):
                    data[bounds[k] : bounds[k + 1]] = file.bytes[start[k] : start[k] + length[k]]
        self.is_cold = time.perf_counter() - began > _COLD_S * len(shard)
        self._check(data, shard, start, length, checksum)
        return data

    def _buffer(self, size: int) -> np.ndarray:
        """Memory that is allocated once: the system takes longer to hand out new memory than to fill it."""
        have: np.ndarray | None = getattr(self._scratch, "bytes", None)
        if have is None or len(have) < size:
            self._scratch.bytes = have = np.empty(size, dtype=np.uint8)
        return have[:size]

    def read_unchecked(self, shard: int, start: int, length: int) -> np.ndarray:
        """The bytes of a range that was checked before."""
        return self._mapped(shard, start + length).bytes[start : start + length].copy()

    def prefetch(self, shard: np.ndarray, start: np.ndarray, length: np.ndarray) -> None:
        """Ask the operating system to read ranges ahead, without waiting."""
        for number, offset, size in zip(shard.tolist(), start.tolist(), length.tolist(), strict=True):
            os.posix_fadvise(self._handle(number).descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close all shards; they are opened again when they are read."""
        while self._open:
            self._open.popitem()[1].close(own=self._process == os.getpid())

    def __del__(self) -> None:
        self.close()

    def _mapped(self, number: int, end: int) -> _OpenShard:
        """A shard that has bytes up to `end`, and has not shrunk: reading beyond its end would be fatal."""
        shard = self._handle(number)
        size = os.fstat(shard.descriptor).st_size
        if size < len(shard.bytes):
            raise self._damaged(number, f"it ends at byte {size}, its index says {len(shard.bytes)}")
        if end > len(shard.bytes):
            raise self._damaged(number, f"its index points beyond its {len(shard.bytes)} bytes")
        return shard

    def _check(
        self, data: np.ndarray, shard: np.ndarray, start: np.ndarray, length: np.ndarray, checksum: np.ndarray
    ) -> None:
        bad = np.flatnonzero(checksums(data, length) != checksum)
        if len(bad):
            begin, end = int(start[bad[0]]), int(start[bad[0]] + length[bad[0]])
            raise self._damaged(int(shard[bad[0]]), f"bytes {begin} to {end} differ from their checksum")

    def _damaged(self, number: int, why: str) -> CorruptFile:
        path = self.folder / self.shards[number].file
        return CorruptFile(f"{path} is damaged", where=str(path), rule=why, fix=REPAIR)

    def _handle(self, number: int) -> _OpenShard:
        """The open shard, once its size is checked."""
        if self._process != os.getpid():  # a fork: closing here would not hurt, but each process opens its own
            self._open, self._process = OrderedDict(), os.getpid()
        if (shard := self._open.get(number)) is not None:
            self._open.move_to_end(number)
            return shard
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
            self._open.popitem(last=False)[1].close(own=True)
        self._open[number] = _OpenShard.map(handle, size)
        return self._open[number]


def _unit(start: np.ndarray, length: np.ndarray) -> int:
    """Bytes of which all ranges are whole multiples, at whole multiples: a range, or a block of a tar file; or 0."""
    whole = int(length[0])
    if whole and (length == whole).all() and not (start % whole).any():
        return whole
    return 0 if ((start | length) % _BLOCK).any() else _BLOCK


def _copy_units(
    files: list[_OpenShard], parts: list[tuple[int, int]], start: np.ndarray, count: np.ndarray, out: np.ndarray
) -> None:
    """Copy ranges of whole units: one call for each shard, whatever its ranges."""
    unit = out.shape[1]
    ends, units = np.cumsum(count), start
    if len(out) != len(count) or not count.all():  # not a unit each
        units = np.repeat(start - (ends - count), count) + np.arange(len(out))
    at = 0
    for file, (_, last) in zip(files, parts, strict=True):
        end = int(ends[last - 1])
        file.table(unit).take(units[at:end], axis=0, out=out[at:end], mode="clip")
        at = end
