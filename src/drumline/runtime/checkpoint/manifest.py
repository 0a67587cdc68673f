"""The manifest of a checkpoint: what was saved, under which plan, and which file has which elements of each tensor.

It is a JSON document next to the files. `SHA256SUMS` has the digest of every file and of the manifest itself, in the
format of `sha256sum -c`; both must agree exactly.
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
from .disk import open_regular_file
from .tensor_files import FileDigest, digest_of

FORMAT, VERSION, BOXES = "drumline-checkpoint", 1, 2
"""`BOXES` is the version of manifests with boxed tensors; all others have `VERSION`."""
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors\Z")
_LARGEST = 2**30
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class BoxRuns:
    """One rank's part of a tensor of a split model, and the files that have its elements."""

    __pydantic_config__ = _STRICT

    box: Box
    runs: tuple[tuple[str, int, int], ...]
    """(file, first index in the flattened box, count), in order."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One whole tensor of the model, the optimizer or the random state, and the files that have its elements."""

    __pydantic_config__ = _STRICT

    shape: tuple[int, ...]
    dtype: str
    runs: tuple[tuple[str, int, int], ...]
    """(file, first index in the flattened tensor, count), in order."""
    kept: bool = True
    """Whether it is in the state dict: non-persistent buffers are saved, but not exported."""
    boxes: tuple[BoxRuns, ...] = ()
    """Its parts, if it was split along a dim; then it has no other runs."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One parameter group of the optimizer."""

    __pydantic_config__ = _STRICT

    names: tuple[str, ...]
    values: dict[str, Any]
    """Encoded options, by the optimizer's own keys."""


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The optimizer's state besides tensors of the parameters' shapes."""

    __pydantic_config__ = _STRICT

    type: str
    groups: tuple[SavedGroup, ...]
    numbers: dict[str, dict[str, Any]]
    """Encoded scalars by parameter and key: Adam's step count."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that `load` needs to know."""

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
    """The position in batches, and what identifies the data: seed, batch size, number of samples."""
    files: dict[str, FileDigest]
    tensors: dict[str, ManifestEntry]
    tied: dict[str, str]
    """Other names of tied parameters -> the name under which they are saved."""
    optimizer: SavedOptimizer
    state: dict[str, Any] = field(default_factory=dict)
    """Encoded state of the schedule, the loss scale, and modules with extra state."""

    def text(self) -> bytes:
        """The text of the file."""
        return (json.dumps(files.to_plain(self), separators=(",", ":"), allow_nan=False) + "\n").encode()


def key_of(entry: str, start: int) -> str:
    """The name of a run in its file: `start` is its first index in the whole tensor."""
    return f"{entry}@{start}"


def sums(manifest: bytes, records: Mapping[str, FileDigest]) -> bytes:
    """The text of SHA256SUMS."""
    lines = [f"{records[name].sha256}  {name}\n" for name in sorted(records)]
    return "".join([*lines, f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"]).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint; the files that it names are not checked yet."""
    text, checksums = _bytes(folder / MANIFEST), _bytes(folder / SUMS)
    own = hashlib.sha256(text).hexdigest().encode()
    if not checksums.endswith(own + b"  " + MANIFEST.encode() + b"\n"):
        raise CorruptFile(
            f"{MANIFEST} or {SUMS} is damaged",
            where=str(folder / MANIFEST),
            rule=f"{SUMS} does not list the digest {own[:16]!r}",
        )
    manifest = parse(text, folder / MANIFEST)
    if sums(text, manifest.files) != checksums:
        raise CorruptFile(f"{SUMS} is damaged", where=str(folder / SUMS), rule=f"it lists the digests in {MANIFEST}")
    return manifest


def parse(text: bytes, path: Path) -> Manifest:
    """Parse and validate the text of a manifest."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CorruptFile(f"{path.name} is damaged", where=str(path), rule=f"JSON: {e}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CorruptFile(f"{path} is no checkpoint manifest", where=str(path), rule=f"format is {FORMAT!r}")
    if data.get("version") not in (VERSION, BOXES):
        raise CorruptFile(
            f"{path.name} has version {data.get('version')!r}",
            where=str(path),
            rule=f"this release reads versions {VERSION} and {BOXES}",
            fix="load it with the release that wrote it",
        )
    manifest = files.from_plain(Manifest, data, str(path), CorruptFile)
    for name in manifest.files:
        if not _PLAIN.match(name):
            raise CorruptFile(
                f"{path.name} names the file {name!r}", where=str(path), rule="file names have no folders"
            )
    for name, entry in manifest.tensors.items():
        check_entry(name, entry, manifest.files, str(path))
    return manifest


def check_entry(name: str, entry: ManifestEntry, records: Iterable[str], where: str) -> None:
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


def _check_boxes(name: str, entry: ManifestEntry, where: str) -> None:
    """Check that the boxes of a tensor split one dim, and cover every index along it once."""
    dim = entry.boxes[0].box.dim
    ranges = sorted(r for boxed in entry.boxes for r in boxed.box.ranges)
    ends = [0, *(stop for _, stop in ranges)]
    whole = 0 <= dim < len(entry.shape) and entry.numel > 0 and not entry.runs
    fits = whole and all(b.box.dim == dim and b.box.ranges for b in entry.boxes) and ends[-1] == entry.shape[dim]
    if not fits or any(start != end or stop <= start for end, (start, stop) in zip(ends, ranges, strict=False)):
        raise CorruptFile(
            f"the boxes of {name!r} do not cover it exactly",
            where=where,
            rule=f"its shape is {entry.shape}; every index along one dim is in one box",
        )


def _check_runs(
    name: str, runs: Iterable[tuple[str, int, int]], numel: int, records: Iterable[str], where: str
) -> None:
    position = 0
    for file, start, length in runs:
        if file not in records:
            raise CorruptFile(
                f"{name!r} is in {file!r}, which the manifest does not list",
                where=where,
                rule="every file is listed with its size and digest",
                fix=nearest(file, records),
            )
        if start != position or length < 1:
            raise CorruptFile(
                f"element {position} of {name!r} is in no file", where=where, rule=f"the next run starts at {start}"
            )
        position += length
    if position != numel:
        raise CorruptFile(f"{name!r} has {position} of its {numel} elements", where=where)


def check_file(folder: Path, name: str, record: FileDigest) -> None:
    """Refuse a file that differs from what was written."""
    actual = digest_of(folder / name)
    if actual != record:
        rule = f"{record.bytes} bytes with the digest {record.sha256[:16]}"
        raise CorruptFile(
            f"{name} is damaged",
            where=str(folder / name),
            rule=f"{rule}; it has {actual.bytes} and {actual.sha256[:16]}",
        )


def _bytes(path: Path) -> bytes:
    handle = open_regular_file(path)
    with os.fdopen(handle, "rb") as f:
        if os.fstat(handle).st_size > _LARGEST:
            raise CorruptFile(f"{path.name} is too large", where=str(path), rule=f"at most {_LARGEST} bytes")
        return f.read()
