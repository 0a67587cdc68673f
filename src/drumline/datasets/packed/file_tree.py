"""The files below a folder, links followed, with what cannot be packed named: loops, broken links, devices."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import InputError
from .source import LARGEST_SAMPLE, PICKLED, Refused, ending_of


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file below a folder."""

    path: str
    """Below the folder, with slashes."""
    size: int
    modified: int
    """In nanoseconds."""


@dataclass(frozen=True, slots=True)
class FileTree:
    """The files of a folder, sorted by path. Names that begin with a dot are ignored: programs leave them behind."""

    files: list[FoundFile]
    refused: list[Refused]
    hidden: int
    """Ignored names."""


def find_files(root: Path, largest: int = LARGEST_SAMPLE) -> FileTree:
    """List all files below a folder, of at most `largest` bytes each."""
    tree = FileTree([], [], 0)
    hidden = 0
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", (_identity(os.stat(root)),))]
    while waiting:
        below, above = waiting.pop()
        try:
            names = sorted(os.listdir(root / below))
        except OSError as e:
            tree.refused.append(Refused(below or str(root), f"the folder cannot be read: {e.strerror}"))
            continue
        for name in names:
            if name.startswith("."):
                hidden += 1
                continue
            path = f"{below}{name}"
            try:
                status = os.stat(root / path)
            except OSError as e:
                reason = "a link to nothing" if os.path.islink(root / path) else e.strerror or "it cannot be read"
                tree.refused.append(Refused(path, reason))
                continue
            if stat.S_ISDIR(status.st_mode):
                if _identity(status) in above:
                    tree.refused.append(Refused(path, "a link to a folder that contains it"))
                else:
                    waiting.append((f"{path}/", (*above, _identity(status))))
                continue
            reason = refusal_of(root / path, status, largest)
            if reason:
                tree.refused.append(Refused(path, reason))
            else:
                tree.files.append(FoundFile(path, status.st_size, status.st_mtime_ns))
    tree.files.sort(key=lambda f: f.path)
    return FileTree(tree.files, tree.refused, hidden)


def refusal_of(path: Path, status: os.stat_result | None = None, largest: int = LARGEST_SAMPLE) -> str:
    """Why a file cannot be packed; empty if it can."""
    if status is None:
        try:
            status = os.stat(path)
        except OSError as e:
            return "a link to nothing" if os.path.islink(path) else e.strerror or "it cannot be read"
    if not stat.S_ISREG(status.st_mode):
        return "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
    if not os.access(path, os.R_OK):
        return "permission denied"
    if ending_of(path.name) in PICKLED:
        return "a pickled file runs code when it is read: convert it to .npy or .safetensors"
    if status.st_size > largest:
        return f"more than {largest} bytes"
    return ""


def read_file(path: Path, name: str) -> bytes:
    """The bytes of a file that was listed; an error names it."""
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError as e:
        raise InputError(
            f"{name!r} cannot be packed: {e.strerror}",
            where=str(path),
            rule="everything is packed, or nothing; complete shards are kept",
            fix="repair or remove it, or --skip to leave it out, and run the same command again",
        ) from None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
