"""Safetensors files, written incrementally with their digest, and read in ranges.

The library's own writer needs every tensor in memory at once and bypasses our disk layer; the format is eight bytes of
length, a JSON header, and the data. Reading uses the library: it maps the file and checks the header.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...core.errors import CorruptFile
from .disk import Disk, open_regular_file

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Dtypes of the format. Others (complex ones) are stored as bytes; the manifest has their dtype."""
SUPPORTED = frozenset(_NAMES)
"""Dtypes that the format supports."""
CHUNK = 8 * 2**20
"""Bytes written or read at a time."""
_SMALL = 2**18


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """One tensor of a file; its elements come from `parts`, in order, when it is written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Iterable[torch.Tensor]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and digest of a file."""

    bytes: int
    sha256: str


def write_tensors(
    disk: Disk, path: Path, tensors: Sequence[TensorToWrite], metadata: Mapping[str, str] | None = None
) -> FileDigest:
    """Write a new file and sync it; returns its size and digest."""
    # widest dtypes first: so each tensor starts at a multiple of its item size
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize if t.dtype in _NAMES else -1)
    digest, written = hashlib.sha256(), 0
    handle = disk.create(path)
    try:
        for data in _coalesced(_file_bytes(ordered, metadata)):
            disk.write(handle, data)
            digest.update(data)
            written += len(data)
        disk.sync(handle)
    finally:
        disk.close(handle)
    return FileDigest(written, digest.hexdigest())


def _file_bytes(tensors: Sequence[TensorToWrite], metadata: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for t in tensors:
        known = t.dtype in _NAMES
        shape = list(t.shape) if known else [t.size]
        header[t.key] = {"dtype": _NAMES.get(t.dtype, "U8"), "shape": shape, "data_offsets": [offset, offset + t.size]}
        offset += t.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for t in tensors:
        count = 0
        for part in t.parts:
            data = raw(part)
            count += len(data)
            for start in range(0, len(data), CHUNK):
                yield data[start : start + CHUNK]
        assert count == t.size, f"{t.key}: got {count} bytes, expected {t.size}"


def _coalesced(parts: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes with small parts merged: a model has many tiny tensors."""
    small = bytearray()
    for part in parts:
        if len(part) < _SMALL:
            small += part
        if small and (len(part) >= _SMALL or len(small) >= _SMALL):
            yield bytes(small)
            small.clear()
        if len(part) >= _SMALL:
            yield part
    if small:
        yield bytes(small)


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous on the host."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def digest_of(path: Path) -> FileDigest:
    """Size and digest of a file on disk."""
    handle = open_regular_file(path)
    digest, size = hashlib.sha256(), 0
    try:
        while data := os.read(handle, CHUNK):
            digest.update(data)
            size += len(data)
    except OSError as e:
        raise CorruptFile(f"{path.name} cannot be read: {e.strerror}", where=str(path)) from None
    finally:
        os.close(handle)
    return FileDigest(size, digest.hexdigest())


class ShardFiles:
    """The files of one folder, opened on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def file(self, name: str) -> Any:
        """One opened file."""
        if name not in self._open:
            path = self._folder / name
            os.close(open_regular_file(path))  # refuses anything but a regular file
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError) as e:
                raise CorruptFile(f"{name} is no safetensors file", where=str(path), rule=str(e)[:200]) from None
        return self._open[name]

    def flat(self, name: str, key: str, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a 1-D tensor of a file."""
        where = str(self._folder / name)
        try:
            part = self.file(name).get_slice(key)
            if dtype not in _NAMES:
                start, stop = start * dtype.itemsize, stop * dtype.itemsize
            values: torch.Tensor = part[start:stop]
        except (SafetensorError, IndexError, ValueError) as e:
            raise CorruptFile(f"{name} has no {key!r}", where=where, rule=str(e)[:200]) from None
        if dtype not in _NAMES:
            # the data in a mapped file may be unaligned for a wider dtype
            values = values.clone().view(dtype) if values.numel() % dtype.itemsize == 0 else values
        if values.dtype != dtype or values.dim() != 1:
            raise CorruptFile(
                f"{key!r} is {values.dtype} with {values.dim()} dims",
                where=where,
                rule=f"the manifest has {dtype}, flattened",
            )
        return values
