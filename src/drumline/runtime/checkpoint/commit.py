"""One save, from every rank's file to the name under which it counts.

Each rank writes its file, then says so with a small part file beside it; no messages travel, so a background thread can
do it while the ranks train. When all parts are there, the first rank writes the manifest and renames the folder: before
that there is no checkpoint, after it there is a complete one.
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
from .disk import Disk
from .folder import LATEST, free_name
from .manifest import (
    BOXES,
    FORMAT,
    MANIFEST,
    SUMS,
    VERSION,
    Boxed,
    Entry,
    Group,
    Manifest,
    Optimizer,
    check_entry,
    key_of,
    sums,
)
from .shard import FileRecord, Stored, write_tensors
from .view import Held

GRACE = 10.0
"""Seconds that a save in the background gets for its peers once the program itself has ended."""


@dataclass(frozen=True, slots=True)
class Order:
    """What one save is to do on one rank."""

    folder: Path
    temporary: Path
    rank: int
    world: int
    held: Sequence[Held]
    """What this rank writes."""
    empty: Sequence[Held]
    """What has no numbers lies in no file, but it is there."""
    groups: list[dict[str, Any]]
    numbers: dict[str, dict[str, Any]]
    about: dict[str, Any]
    """What the manifest says beside tensors; of the first rank."""
    names: frozenset[str]
    """Parameters and buffers that a checkpoint of the model has."""
    optimizer: str
    patience: float


def write_part(disk: Disk, order: Order) -> None:
    """Write this rank's numbers, then say that they are there."""
    name = f"rank-{order.rank:05d}.safetensors"
    disk.make_folder(order.temporary)
    tensors = [Stored(key_of(h.entry, h.begins), h.tensor.dtype, (h.tensor.numel(),), (h.tensor,)) for h in order.held]
    record = write_tensors(disk, order.temporary / name, tensors)
    part = {
        "file": name,
        "bytes": record.bytes,
        "sha256": record.sha256,
        "runs": [[h.entry, h.start, h.tensor.numel(), _as_list(h.box)] for h in order.held],
        "entries": {h.entry: [list(h.shape), dtype_name(h.tensor.dtype), h.kept] for h in (*order.held, *order.empty)},
        "groups": order.groups,
        "numbers": order.numbers,
    }
    disk.replace_file(_part(order.temporary, order.rank), json.dumps(part).encode(), "new")


def finish(disk: Disk, order: Order, abort: threading.Event) -> Path:
    """The first rank's work: wait for all parts, write the manifest, give the folder its name."""
    parts = [_wait(order, rank, abort) for rank in range(order.world)]
    manifest = _merge(order, parts)
    text = manifest.text()
    for rank in range(order.world):
        disk.remove(_part(order.temporary, rank))
    disk.write_file(order.temporary / MANIFEST, text)
    disk.write_file(order.temporary / SUMS, sums(text, manifest.files))
    disk.sync_folder(order.temporary)
    path = order.folder / free_name(order.folder, manifest.step)
    disk.rename(order.temporary, path)
    disk.sync_folder(order.folder)
    disk.replace_file(order.folder / LATEST, f"{path.name}\n".encode(), "new")
    return path


def _wait(order: Order, rank: int, abort: threading.Event) -> dict[str, Any]:
    """The part of a rank, when it is there. `abort` is set when it is known that it will not come."""
    nap, end = 0.001, time.monotonic() + order.patience
    path = _part(order.temporary, rank)
    while not path.exists():
        if not threading.main_thread().is_alive():
            end = min(end, time.monotonic() + GRACE)
        if abort.is_set() or time.monotonic() > end:
            raise GaveUp(
                f"rank {rank} did not write its part",
                where=str(order.temporary),
                rule=f"within {order.patience:g} s, or {GRACE:g} s after the end of the program",
                fix="a folder that all ranks share",
            )
        abort.wait(nap)
        nap = min(0.1, nap * 1.5)
    part: dict[str, Any] = json.loads(path.read_bytes())
    return part


def _merge(order: Order, parts: list[dict[str, Any]]) -> Manifest:
    """One manifest from all parts; every number of every tensor must be there once."""
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
        name: _entry(tuple(shape), dtype, runs.get(name, {}), kept=kept)
        for name, (shape, dtype, kept) in shapes.items()
    }
    records = {p["file"]: FileRecord(p["bytes"], p["sha256"]) for p in parts}
    missing = sorted(order.names - tensors.keys())
    if missing:
        raise GaveUp(f"no rank has written {missing[0]!r}", where=str(order.temporary), rule="a checkpoint has all")
    for name, entry in tensors.items():
        check_entry(name, entry, records, str(order.temporary))
    made = tuple(Group(tuple(names), values) for names, values in groups)
    return Manifest(
        format=FORMAT,
        version=BOXES if any(e.boxes for e in tensors.values()) else VERSION,
        world=order.world,
        files=records,
        tensors=tensors,
        optimizer=Optimizer(order.optimizer, made, numbers),
        **order.about,
    )


def _entry(
    shape: tuple[int, ...], dtype: str, found: dict[Box | None, list[tuple[int, int, str]]], *, kept: bool
) -> Entry:
    """A tensor, of what the ranks have written of it."""
    runs = {box: tuple((f, a, n) for a, n, f in sorted(some)) for box, some in found.items()}
    plain = runs.pop(None, ())
    boxes = (Boxed(box, some) for box, some in runs.items() if box is not None)
    return Entry(shape, dtype, plain, kept, tuple(sorted(boxes, key=lambda boxed: boxed.box.ranges)))


def _as_list(box: Box | None) -> list[Any] | None:
    return None if box is None else [box.dim, box.ranges]


def _as_box(told: list[Any] | None) -> Box | None:
    return None if told is None else Box(told[0], tuple((a, b) for a, b in told[1]))


def _part(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.json"


def as_error(e: BaseException, step: int, folder: Path) -> DrumlineError:
    """What went wrong in a save, for people."""
    if isinstance(e, DrumlineError):
        rule, fix = e.rule or e.what, e.fix
        return GaveUp(f"step {step} was not saved: {e.what}", where=e.where or str(folder), rule=rule, fix=fix)
    reason = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else f"{type(e).__name__}: {e}"
    where = str(e.filename) if isinstance(e, OSError) and e.filename else str(folder)
    return GaveUp(
        f"step {step} was not saved: {reason}",
        where=where,
        rule="the checkpoints from before are as they were",
        fix="make room, or mend the disk; the next save tries again",
    )
