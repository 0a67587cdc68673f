"""Every change that a checkpoint makes to the disk goes through here, one small operation at a time.

So a test can end the program before, within or after each of them, or let the disk be full, and look at what is left.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from ...core.errors import CorruptFile


class Disk:
    """The file system as it is."""

    def make_folder(self, path: Path) -> None:
        """Make a folder; one that is there already is fine."""
        os.makedirs(path, exist_ok=True)

    def create(self, path: Path) -> int:
        """Open a new file for writing; one that is there already is refused, and so is a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: bytes | memoryview) -> None:
        """Write all of it."""
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]

    def sync(self, handle: int) -> None:
        """Return when the file's bytes are on the disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a file."""
        os.close(handle)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder are on the disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or a folder another name, at once; a file of that name is replaced."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove one file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove one empty folder."""
        os.rmdir(path)

    def open_lock(self, path: Path) -> int:
        """Open a file that stays there, to be locked."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def lock(self, handle: int) -> bool:
        """Whether this process has the file for itself now; the kernel gives it back when the process ends."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def rewrite(self, handle: int, data: bytes) -> None:
        """Put other bytes in the place of all that a small file holds."""
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)

    def touch(self, handle: int) -> None:
        """Make a file new."""
        os.utime(handle)

    def write_file(self, path: Path, data: bytes) -> None:
        """A small new file, on the disk when this returns."""
        handle = self.create(path)
        try:
            self.write(handle, data)
            self.sync(handle)
        finally:
            self.close(handle)

    def replace_file(self, path: Path, data: bytes, mark: str) -> None:
        """The old bytes or the new ones, never something between: another name first, then one rename."""
        temporary = path.with_name(f".{path.name}-{mark}")
        if temporary.exists():
            self.remove(temporary)
        self.write_file(temporary, data)
        self.rename(temporary, path)
        self.sync_folder(path.parent)

    def remove_all(self, path: Path) -> None:
        """A folder and the files in it. Checkpoints have no folders within; links are removed, not followed."""
        for name in sorted(os.listdir(path)):
            self.remove(path / name)
        self.remove_folder(path)


def open_plain(path: Path) -> int:
    """Open a file for reading; a link, a folder or a device in its place is refused."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CorruptFile(f"{path.name} is missing", where=str(path)) from None
    except OSError as e:
        reason = "it is a link" if path.is_symlink() else e.strerror
        raise CorruptFile(
            f"{path.name} cannot be read: {reason}", where=str(path), rule="files of a checkpoint are plain files"
        ) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CorruptFile(f"{path.name} is no plain file", where=str(path))
    return handle
