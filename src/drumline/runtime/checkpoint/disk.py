"""Every change that a checkpoint makes on disk, one small operation at a time.

So a test can kill the program before, during or after each of them, or simulate a full disk, and check what is left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from ...core.errors import CorruptFile


class Disk:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Make a folder if it does not exist."""
        os.makedirs(path, exist_ok=True)

    def create(self, path: Path) -> int:
        """Open a new file for writing; existing files and links are refused."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: bytes | memoryview) -> None:
        """Write all bytes."""
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]

    def sync(self, handle: int) -> None:
        """Flush a file to disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a file."""
        os.close(handle)

    def sync_folder(self, path: Path) -> None:
        """Flush the entries of a folder to disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically; a file of that name is replaced."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove one file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove one empty folder."""
        os.rmdir(path)

    def open_lock(self, path: Path) -> int:
        """Open a persistent file for locking."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def lock(self, handle: int) -> bool | None:
        """Try to lock a file for this process; the kernel releases it when the process ends.

        None if the file system has no locks.
        """
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                return None
            raise
        return True

    def rewrite(self, handle: int, data: bytes) -> None:
        """Replace the contents of a small file."""
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)

    def touch(self, handle: int) -> None:
        """Update the modification time of a file."""
        os.utime(handle)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a small new file and flush it."""
        handle = self.create(path)
        try:
            self.write(handle, data)
            self.sync(handle)
        finally:
            self.close(handle)

    def replace_file(self, path: Path, data: bytes, mark: str) -> None:
        """Replace a file atomically: write a temporary name first, then rename."""
        temporary = path.with_name(f".{path.name}-{mark}")
        if temporary.exists():
            self.remove(temporary)
        self.write_file(temporary, data)
        self.rename(temporary, path)
        self.sync_folder(path.parent)

    def remove_all(self, path: Path) -> None:
        """Remove a folder and its files. Checkpoints have no subfolders; links are removed, not followed."""
        for name in sorted(os.listdir(path)):
            self.remove(path / name)
        self.remove_folder(path)


def open_regular_file(path: Path) -> int:
    """Open a regular file for reading; links, folders and devices are refused."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CorruptFile(f"{path.name} is missing", where=str(path)) from None
    except OSError as e:
        reason = "it is a link" if path.is_symlink() else e.strerror
        raise CorruptFile(
            f"{path.name} cannot be read: {reason}", where=str(path), rule="files of a checkpoint are regular files"
        ) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CorruptFile(f"{path.name} is no regular file", where=str(path))
    return handle
