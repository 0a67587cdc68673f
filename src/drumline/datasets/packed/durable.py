"""Files that are complete or absent: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

from ...core.errors import InputError

PARTIAL = ".partial"
"""Ending of temporary names. What has it is never read, and removed by the next run."""
_PIECE = 2**21
"""Bytes of one write, at whole multiples of it: the system then keeps the file in pages of this size, which are mapped
by one entry instead of 512. Where it does not, nothing else changes."""


class DurableFile:
    """A new file, hashed while it is written. Leaving the block normally publishes it; an error removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        """Bytes written so far."""
        self.digest = hashlib.sha256()
        self._temporary = path.with_name(f".{path.name}{PARTIAL}")
        self._waiting: list[bytes] = []
        self._bytes_waiting = 0
        self._handle = -1

    def __enter__(self) -> DurableFile:
        try:
            self._handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise self._failed(e) from None
        return self

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._waiting.append(data)
        self._bytes_waiting += len(data)
        self.position += len(data)
        if self._bytes_waiting >= _PIECE:
            self._flush(self._bytes_waiting // _PIECE * _PIECE)

    def _flush(self, size: int) -> None:
        """Write the first `size` bytes that wait."""
        data = b"".join(self._waiting)
        self._waiting, self._bytes_waiting = [data[size:]], len(data) - size
        view = memoryview(data)[:size]
        self.digest.update(view)
        try:
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError as e:
            raise self._failed(e) from None

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._flush(self._bytes_waiting)
                self._publish()
        finally:
            os.close(self._handle)
            if self._temporary.exists():
                with contextlib.suppress(OSError):
                    os.unlink(self._temporary)

    def _publish(self) -> None:
        try:
            os.fsync(self._handle)
            os.rename(self._temporary, self.path)
            sync_folder(self.path.parent)
        except OSError as e:
            raise self._failed(e) from None

    def _failed(self, e: OSError) -> InputError:
        return InputError(
            f"{self.path} cannot be written: {e.strerror}",
            where=str(self.path.parent),
            rule="a shard is published when all of it is on disk; complete shards are kept",
            fix="make room, then run the same `drumline pack SRC DST` again: it goes on where it stopped",
        )


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file, or nothing."""
    with DurableFile(path) as f:
        f.write(data)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
