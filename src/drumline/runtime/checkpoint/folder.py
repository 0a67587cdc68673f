"""The folder of a run's checkpoints: listing, finding the newest, and pruning.

LATEST                 name of the newest complete checkpoint
LOCK                   the job that writes here
step-00000120/         manifest.json, SHA256SUMS, rank-00000.safetensors, ...
.writing-NONCE-.../    an unfinished save; removed by the next job that writes here
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
_LEFTOVER = re.compile(r"\.(?:writing|removing)-.+\Z")


def name_of(step: int, again: int = 0) -> str:
    """The name of a checkpoint; a step that is saved again gets another name, because nothing is overwritten."""
    return f"step-{step:08d}" + (f"-{again}" if again else "")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first. A checkpoint gets its name only when it is complete on disk."""
    checkpoints = []
    try:
        with os.scandir(folder) as items:
            for item in items:
                match = _NAME.match(item.name)
                if match and item.is_dir(follow_symlinks=False):
                    checkpoints.append((int(match[1]), int(match[2] or 0), folder / item.name))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise InputError(f"{folder} cannot be read: {e.strerror}") from None
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    match = _NAME.match(path.name)
    return int(match[1]) if match else 0


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoint at a path, or the checkpoints in a folder, newest first."""
    if (path / MANIFEST).exists():
        return [path]
    if not path.is_dir():
        raise InputError(f"no checkpoint {path}", rule="a checkpoint, or the folder of a run's checkpoints")
    checkpoints = complete_checkpoints(path)
    if not checkpoints and (path / "checkpoints").is_dir():
        checkpoints = complete_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise InputError(f"no checkpoint in {path}", rule="complete checkpoints are folders named step-NUMBER")
    return checkpoints


def free_name(folder: Path, step: int) -> str:
    """An unused name for a checkpoint of this step."""
    again = 0
    while os.path.lexists(folder / name_of(step, again)):
        again += 1
    return name_of(step, again)


def looks_complete(path: Path) -> bool:
    """Whether a checkpoint has its manifest and every file in its full size; digests are checked when loading."""
    try:
        records = read_manifest(path).files
        return all((path / name).stat().st_size == record.bytes for name, record in records.items())
    except (CorruptFile, OSError):
        return False


def prune(disk: Disk, folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` intact checkpoints; damaged ones do not count."""
    kept = 0
    for path in complete_checkpoints(folder):
        if kept < keep:
            kept += looks_complete(path)
        else:
            _remove(disk, path)


def _remove(disk: Disk, path: Path) -> None:
    """Rename it first, so that a partly removed checkpoint is never taken for a complete one."""
    renamed = path.with_name(f".removing-{path.name}")
    if renamed.exists():
        disk.remove_all(renamed)
    disk.rename(path, renamed)
    disk.remove_all(renamed)


def remove_leftovers(disk: Disk, folder: Path) -> None:
    """Remove what unfinished saves have left; only the owner of the lock may call this."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if _LEFTOVER.match(name) and path.is_dir() and not path.is_symlink():
            disk.remove_all(path)
