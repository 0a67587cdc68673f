"""Tensors: the rows of `.npy`, `.npz` or `.safetensors` files are the samples, each array a column."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import InputError
from ...core.regular_files import open_regular
from .source import PackSource
from .table_source import array_bytes

SUFFIXES = (".npy", ".npz", ".safetensors")
ORDER = ("input", "inputs", "x", "image", "images", "data", "target", "targets", "y", "label", "labels")
"""Names that come first, in this order, so that a sample is (input, target)."""


class ArraySource(PackSource):
    """Arrays of one length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrays = _load(path)
        lengths = {name: len(a) if a.ndim else None for name, a in self.arrays.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in self.arrays.items())
            raise InputError(f"the tensors of {path} have no common length: {shapes}", rule="one row for each sample")
        if not len(self):
            raise InputError(f"the tensors of {path} are empty", rule="at least one sample")
        names = sorted(self.arrays, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
        self.columns = tuple(names)
        self.endings = tuple("npy" if len(names) == 1 else f"{_member_name(n)}.npy" for n in names)
        if len(set(self.endings)) < len(names):
            raise InputError(f"{path}: two names differ only in case or signs", where=", ".join(names))
        self.form = "value" if len(names) == 1 else "tuple"

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def sizes(self) -> np.ndarray:
        """Bytes of a row."""
        row = sum(a[0].nbytes + 128 for a in self.arrays.values())
        return np.full(len(self), row, dtype=np.int64)

    def members(self, i: int) -> list[tuple[int, bytes]]:
        """The rows of all arrays."""
        return [(code, array_bytes(np.asarray(self.arrays[name][i]))) for code, name in enumerate(self.columns)]

    def name(self, i: int) -> str:
        """The number of the row."""
        return f"row {i}"

    def facts(self) -> Iterable[str]:
        """Shapes, size and time of the file."""
        status = self.path.stat()
        yield f"{status.st_size} {status.st_mtime_ns}"
        yield from (f"{name} {a.dtype} {a.shape}" for name, a in self.arrays.items())


def _member_name(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name.lower())[:40]


def _load(path: Path) -> dict[str, Any]:
    open_regular(path).close()
    try:
        if path.suffix == ".npy":
            arrays: dict[str, Any] = {"value": np.load(path, mmap_mode="r", allow_pickle=False)}
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        else:
            from safetensors.numpy import load_file

            arrays = load_file(path)
    except Exception as e:  # each library has its own errors for a damaged file
        rule = (
            "numbers only: nothing is unpickled"
            if "pickle" in str(e) or "objects" in str(e)
            else f"{type(e).__name__}: {e}"
        )
        raise InputError(f"{path} cannot be packed", where=str(path), rule=rule) from None
    if not arrays:
        raise InputError(f"{path} has no tensors", rule="at least one")
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise InputError(f"{name!r} of {path} is of type {array.dtype}", rule="numbers that numpy has")
    return arrays
