"""The folder of a run's checkpoints: which are there, which is the newest, and which may go.

LATEST                 the name of the newest complete one
LOCK                   who writes here
step-00000120/         manifest.json, SHA256SUMS, rank-00000.safetensors, ...
.writing-NONCE-.../    a save that has not ended; removed by the next job that writes here
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...core.errors import CorruptFile, InputError
from .disk import Disk
from .manifest import MANIFEST, read_manifest

LATEST = "LATEST"
_NAME = re.compile(r"step-(\d{8,18})(?:-(\d{1,9}))?\Z")
_LEFT = re.compile(r"\.(?:writing|removing)-.+\Z")


def name_of(step: int, again: int = 0) -> str:
    """The name of a checkpoint; one that is saved again has another name, because nothing is overwritten."""
    return f"step-{step:08d}" + (f"-{again}" if again else "")


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first. A folder gets its name only when all of it is on the disk."""
    found = []
    try:
        with os.scandir(folder) as items:
            for item in items:
                match = _NAME.match(item.name)
                if match and item.is_dir(follow_symlinks=False):
                    found.append((int(match[1]), int(match[2] or 0), folder / item.name))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise InputError(f"{folder} cannot be read: {e.strerror}") from None
    return [path for _, _, path in sorted(found, reverse=True)]


def find(path: Path) -> list[Path]:
    """The checkpoints that a path means, best first: that one, or those in the folder, newest first."""
    if (path / MANIFEST).exists():
        return [path]
    if not path.is_dir():
        raise InputError(f"no checkpoint {path}", rule="a checkpoint, or the folder of a run's checkpoints")
    found = complete(path)
    if not found and (path / "checkpoints").is_dir():
        found = complete(path / "checkpoints")
    if not found:
        raise InputError(f"no checkpoint in {path}", rule="complete checkpoints are folders named step-NUMBER")
    return found


def free_name(folder: Path, step: int) -> str:
    """A name for a checkpoint of this step that is not taken."""
    again = 0
    while os.path.lexists(folder / name_of(step, again)):
        again += 1
    return name_of(step, again)


def sound(path: Path) -> bool:
    """Whether a checkpoint has its manifest and every file in its full size; digests are for loading."""
    try:
        records = read_manifest(path).files
        return all((path / name).stat().st_size == record.bytes for name, record in records.items())
    except (CorruptFile, OSError):
        return False


def prune(disk: Disk, folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` sound checkpoints; damaged ones count for nothing, and go when they are old."""
    kept = 0
    for path in complete(folder):
        if kept < keep:
            kept += sound(path)
        else:
            _remove(disk, path)


def _remove(disk: Disk, path: Path) -> None:
    """First its name goes, at once, so that a half-removed checkpoint is never taken for one."""
    aside = path.with_name(f".removing-{path.name}")
    if aside.exists():
        disk.remove_all(aside)
    disk.rename(path, aside)
    disk.remove_all(aside)


def clean(disk: Disk, folder: Path, spare: str = "") -> None:
    """Remove what saves that did not end have left; only the owner of the lock may."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if _LEFT.match(name) and name != spare and path.is_dir() and not path.is_symlink():
            disk.remove_all(path)
