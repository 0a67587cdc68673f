"""One save, from every rank's file to the final name of the checkpoint.

Each rank writes its tensors, then a small part file next to them that says so; no messages are sent, so a background
thread can do it while the ranks train. When all parts exist, the first rank writes the manifest and renames the folder:
before that there is no checkpoint, after it there is a complete one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import DrumlineError, GaveUp
from .boxes import Box
from .codec import dtype_name
from .contents import TensorRun
from .disk import Disk
from .folder import LATEST, free_name
from .manifest import (
    BOXES,
    FORMAT,
    MANIFEST,
    SUMS,
    VERSION,
    BoxRuns,
    Manifest,
    ManifestEntry,
    SavedGroup,
    SavedOptimizer,
    check_entry,
    key_of,
    sums,
)
from .tensor_files import FileDigest, TensorToWrite, write_tensors

GRACE = 10.0
"""Seconds that a background save waits for its peers after the program itself has ended."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One rank's part of one save."""

    folder: Path
    temporary: Path
    rank: int
    world: int
    runs: Sequence[TensorRun]
    """This rank's elements."""
    empty: Sequence[TensorRun]
    """Tensors without elements: in no file, but in the manifest."""
    groups: list[dict[str, Any]]
    numbers: dict[str, dict[str, Any]]
    about: dict[str, Any]
    """The manifest's fields besides tensors; on the first rank."""
    names: frozenset[str]
    """Parameters and buffers that a checkpoint of the model must have."""
    optimizer: str
    patience: float


def write_part(disk: Disk, request: SaveRequest) -> None:
    """Write this rank's tensors, then its part file."""
    name = f"rank-{request.rank:05d}.safetensors"
    disk.make_folder(request.temporary)
    tensors = [
        TensorToWrite(key_of(run.entry, run.first_index), run.tensor.dtype, (run.tensor.numel(),), (run.tensor,))
        for run in request.runs
    ]
    record = write_tensors(disk, request.temporary / name, tensors)
    part = {
        "file": name,
        "bytes": record.bytes,
        "sha256": record.sha256,
        "runs": [[run.entry, run.start, run.tensor.numel(), _as_list(run.box)] for run in request.runs],
        "entries": {
            run.entry: [list(run.shape), dtype_name(run.tensor.dtype), run.persistent]
            for run in (*request.runs, *request.empty)
        },
        "groups": request.groups,
        "numbers": request.numbers,
    }
    disk.replace_file(_part(request.temporary, request.rank), json.dumps(part).encode(), "new")


def finish(disk: Disk, request: SaveRequest, abort: threading.Event) -> Path:
    """On the first rank: wait for all parts, write the manifest, rename the folder."""
    parts = [_wait(request, rank, abort) for rank in range(request.world)]
    manifest = _merge(request, parts)
    text = manifest.text()
    for rank in range(request.world):
        disk.remove(_part(request.temporary, rank))
    disk.write_file(request.temporary / MANIFEST, text)
    disk.write_file(request.temporary / SUMS, sums(text, manifest.files))
    disk.sync_folder(request.temporary)
    path = request.folder / free_name(request.folder, manifest.step)
    disk.rename(request.temporary, path)
    disk.sync_folder(request.folder)
    disk.replace_file(request.folder / LATEST, f"{path.name}\n".encode(), "new")
    return path


def _wait(request: SaveRequest, rank: int, abort: threading.Event) -> dict[str, Any]:
    """The part of a rank, once it exists. `abort` is set when it is known not to come."""
    nap, end = 0.001, time.monotonic() + request.patience
    path = _part(request.temporary, rank)
    while not path.exists():
        if not threading.main_thread().is_alive():
            end = min(end, time.monotonic() + GRACE)
        if abort.is_set() or time.monotonic() > end:
            raise GaveUp(
                f"rank {rank} did not write its part",
                where=str(request.temporary),
                rule=f"within {request.patience:g} s, or {GRACE:g} s after the end of the program",
                fix="use a folder that all ranks share",
            )
        abort.wait(nap)
        nap = min(0.1, nap * 1.5)
    part: dict[str, Any] = json.loads(path.read_bytes())
    return part


def _merge(request: SaveRequest, parts: list[dict[str, Any]]) -> Manifest:
    """Merge all parts into one manifest; every element of every tensor must be there once."""
    runs: dict[str, dict[Box | None, list[tuple[int, int, str]]]] = {}
    shapes: dict[str, tuple[list[int], str, bool]] = {}
    groups: list[tuple[dict[str, None], dict[str, Any]]] = []
    numbers: dict[str, dict[str, Any]] = {}
    for part in parts:
        for entry, start, length, box in part["runs"]:
            runs.setdefault(entry, {}).setdefault(_as_box(box), []).append((start, length, part["file"]))
        shapes.update(part["entries"])
        for name, values in part["numbers"].items():
            numbers.setdefault(name, {}).update(values)
        for i, group in enumerate(part["groups"]):
            if i == len(groups):
                groups.append(({}, group["values"]))
            groups[i][0].update(dict.fromkeys(group["names"]))
    tensors = {
        name: _entry(tuple(shape), dtype, runs.get(name, {}), persistent=persistent)
        for name, (shape, dtype, persistent) in shapes.items()
    }
    records = {p["file"]: FileDigest(p["bytes"], p["sha256"]) for p in parts}
    missing = sorted(request.names - tensors.keys())
    if missing:
        raise GaveUp(f"no rank wrote {missing[0]!r}", where=str(request.temporary), rule="a checkpoint is complete")
    for name, entry in tensors.items():
        check_entry(name, entry, records, str(request.temporary))
    saved_groups = tuple(SavedGroup(tuple(names), values) for names, values in groups)
    return Manifest(
        format=FORMAT,
        version=BOXES if any(e.boxes for e in tensors.values()) else VERSION,
        world=request.world,
        files=records,
        tensors=tensors,
        optimizer=SavedOptimizer(request.optimizer, saved_groups, numbers),
        **request.about,
    )


def _entry(
    shape: tuple[int, ...], dtype: str, written: dict[Box | None, list[tuple[int, int, str]]], *, persistent: bool
) -> ManifestEntry:
    """The entry of a tensor, from the runs that the ranks wrote."""
    runs = {box: tuple((f, a, n) for a, n, f in sorted(some)) for box, some in written.items()}
    plain = runs.pop(None, ())
    boxes = (BoxRuns(box, some) for box, some in runs.items() if box is not None)
    return ManifestEntry(shape, dtype, plain, persistent, tuple(sorted(boxes, key=lambda boxed: boxed.box.ranges)))


def _as_list(box: Box | None) -> list[Any] | None:
    return None if box is None else [box.dim, box.ranges]


def _as_box(values: list[Any] | None) -> Box | None:
    return None if values is None else Box(values[0], tuple((a, b) for a, b in values[1]))


def _part(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.json"


def as_error(e: BaseException, step: int, folder: Path) -> DrumlineError:
    """The error of a failed save, for users."""
    if isinstance(e, DrumlineError):
        rule, fix = e.rule or e.what, e.fix
        return GaveUp(f"step {step} was not saved: {e.what}", where=e.where or str(folder), rule=rule, fix=fix)
    reason = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else f"{type(e).__name__}: {e}"
    where = str(e.filename) if isinstance(e, OSError) and e.filename else str(folder)
    return GaveUp(
        f"step {step} was not saved: {reason}",
        where=where,
        rule="earlier checkpoints are unchanged",
        fix="free disk space, or repair the disk; the next save tries again",
    )
