"""The manifest of a checkpoint: what was saved, by whom, and in which file every run of numbers lies.

It is a JSON document beside the files. `SHA256SUMS` holds the digest of every file and of the manifest itself, as
`sha256sum -c` reads it; both must agree to the byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from ...core import files
from ...core.errors import CorruptFile, nearest
from .boxes import Box
from .codec import dtype_of
from .disk import open_plain
from .shard import FileRecord, digest_of

FORMAT, VERSION, BOXES = "drumline-checkpoint", 1, 2
"""`BOXES` is the version of a manifest with tensors in boxes; all others are as they were before there were any."""
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors\Z")
_LARGEST = 2**30
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Boxed:
    """A part of a tensor that one rank of a split model had, and where its numbers lie."""

    __pydantic_config__ = _STRICT

    box: Box
    runs: tuple[tuple[str, int, int], ...]
    """(file, first number of the flattened box, how many), in the order of the numbers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the whole model, its optimizer or the ranks' random state, and where its numbers lie."""

    __pydantic_config__ = _STRICT

    shape: tuple[int, ...]
    dtype: str
    runs: tuple[tuple[str, int, int], ...]
    """(file, first number, how many), in the order of the numbers."""
    kept: bool = True
    """Whether a state dict has it: buffers that are not persistent are saved, but not exported."""
    boxes: tuple[Boxed, ...] = ()
    """Where it was split along a dim; then it has no other runs."""

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter group of the optimizer."""

    __pydantic_config__ = _STRICT

    names: tuple[str, ...]
    values: dict[str, Any]
    """Encoded, by the optimizer's own keys."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What the optimizer holds beside tensors of the parameters' shapes."""

    __pydantic_config__ = _STRICT

    type: str
    groups: tuple[Group, ...]
    numbers: dict[str, dict[str, Any]]
    """Encoded single numbers by parameter and key: Adam's count of steps."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that `load` needs to know."""

    __pydantic_config__ = _STRICT

    format: str
    version: int
    step: int
    plan: str
    world: int
    written: str
    job: dict[str, str]
    versions: dict[str, str]
    data: dict[str, int]
    """The position, in batches; the rest tells whether it is the same data."""
    files: dict[str, FileRecord]
    tensors: dict[str, Entry]
    tied: dict[str, str]
    """Other names of a parameter, and the one it is saved under."""
    optimizer: Optimizer
    state: dict[str, Any] = field(default_factory=dict)
    """Encoded: the schedule, the loss scale, what modules keep beside tensors."""

    def text(self) -> bytes:
        """The file."""
        return (json.dumps(files.to_plain(self), separators=(",", ":"), allow_nan=False) + "\n").encode()


def key_of(entry: str, start: int) -> str:
    """What a run is called in its file: `start` is the number of the whole tensor that it begins with."""
    return f"{entry}@{start}"


def sums(manifest: bytes, records: Mapping[str, FileRecord]) -> bytes:
    """The text of SHA256SUMS."""
    lines = [f"{records[name].sha256}  {name}\n" for name in sorted(records)]
    return "".join([*lines, f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"]).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, when it is what was written; the files it names are not looked at yet."""
    text, seal = _bytes(folder / MANIFEST), _bytes(folder / SUMS)
    own = hashlib.sha256(text).hexdigest().encode()
    if not seal.endswith(own + b"  " + MANIFEST.encode() + b"\n"):
        raise CorruptFile(
            f"{MANIFEST} or {SUMS} is damaged", where=str(folder / MANIFEST), rule=f"{SUMS} does not say {own[:16]!r}"
        )
    manifest = parse(text, folder / MANIFEST)
    if sums(text, manifest.files) != seal:
        raise CorruptFile(f"{SUMS} is damaged", where=str(folder / SUMS), rule=f"it says what {MANIFEST} says")
    return manifest


def parse(text: bytes, path: Path) -> Manifest:
    """Read and check a manifest's text, whoever wrote it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CorruptFile(f"{path.name} is damaged", where=str(path), rule=f"JSON: {e}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CorruptFile(f"{path} is no manifest of a checkpoint", where=str(path), rule=f"format is {FORMAT!r}")
    if data.get("version") not in (VERSION, BOXES):
        raise CorruptFile(
            f"{path.name} has version {data.get('version')!r}",
            where=str(path),
            rule=f"this program reads {VERSION} and {BOXES}",
            fix="load it with the release that wrote it",
        )
    manifest = files.from_plain(Manifest, data, str(path), CorruptFile)
    for name in manifest.files:
        if not _PLAIN.match(name):
            raise CorruptFile(
                f"{path.name} names the file {name!r}", where=str(path), rule="names are plain: no folders, no links"
            )
    for name, entry in manifest.tensors.items():
        check_entry(name, entry, manifest.files, str(path))
    return manifest


def check_entry(name: str, entry: Entry, records: Iterable[str], where: str) -> None:
    """Refuse a tensor whose runs do not cover each of its numbers exactly once."""
    dtype_of(entry.dtype, where)
    if any(n < 0 for n in entry.shape):
        raise CorruptFile(f"{name!r} has the shape {entry.shape}", where=where)
    if not entry.boxes:
        _check_runs(name, entry.runs, entry.numel, records, where)
        return
    _check_boxes(name, entry, where)
    for boxed in entry.boxes:
        _check_runs(f"{name} ({boxed.box})", boxed.runs, boxed.box.numel(entry.shape), records, where)


def _check_boxes(name: str, entry: Entry, where: str) -> None:
    """The boxes of a tensor are cut along one dim, and have each place along it once."""
    dim = entry.boxes[0].box.dim
    ranges = sorted(r for boxed in entry.boxes for r in boxed.box.ranges)
    ends = [0, *(stop for _, stop in ranges)]
    whole = 0 <= dim < len(entry.shape) and entry.numel > 0 and not entry.runs
    fits = whole and all(b.box.dim == dim and b.box.ranges for b in entry.boxes) and ends[-1] == entry.shape[dim]
    if not fits or any(start != end or stop <= start for end, (start, stop) in zip(ends, ranges, strict=False)):
        raise CorruptFile(
            f"the boxes of {name!r} do not cover it",
            where=where,
            rule=f"its shape is {entry.shape}, and along one dim every place is in one box",
        )


def _check_runs(
    name: str, runs: Iterable[tuple[str, int, int]], numel: int, records: Iterable[str], where: str
) -> None:
    place = 0
    for file, start, length in runs:
        if file not in records:
            raise CorruptFile(
                f"{name!r} lies in {file!r}, which the manifest does not list",
                where=where,
                rule="every file has its size and digest",
                fix=nearest(file, records),
            )
        if start != place or length < 1:
            raise CorruptFile(f"number {place} of {name!r} is in no file", where=where, rule=f"next is number {start}")
        place += length
    if place != numel:
        raise CorruptFile(f"{name!r} has {place} of its {numel} numbers", where=where)


def check_file(folder: Path, name: str, record: FileRecord) -> None:
    """Refuse a file that is not, to the bit, what was written."""
    found = digest_of(folder / name)
    if found != record:
        rule = f"{record.bytes} bytes with the digest {record.sha256[:16]}"
        raise CorruptFile(
            f"{name} is damaged",
            where=str(folder / name),
            rule=f"{rule}; it has {found.bytes} and {found.sha256[:16]}",
        )


def _bytes(path: Path) -> bytes:
    handle = open_plain(path)
    with os.fdopen(handle, "rb") as f:
        if os.fstat(handle).st_size > _LARGEST:
            raise CorruptFile(f"{path.name} is too large", where=str(path), rule=f"at most {_LARGEST} bytes")
        return f.read()
