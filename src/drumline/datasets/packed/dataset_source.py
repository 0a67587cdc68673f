"""A map-style dataset of the user, `path.py:name`: tensors, numbers, texts and bytes become the members of a sample."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...core.errors import InputError
from ...core.job import call_user_code
from ..seeding import seeded_random
from .source import PackSource
from .table_source import array_bytes

RULE = "a sample is a tensor, array, number, text or bytes, or a tuple or dict of those: nothing is pickled"


class DatasetSource(PackSource):
    """The samples of a dataset, in order. Random augmentation depends on the number of the sample alone."""

    def __init__(self, dataset: Any, reference: str, digest: str = "") -> None:
        self.dataset, self.reference, self._digest = dataset, reference, digest
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise InputError(
                f"{reference} is a {type(dataset).__name__}", rule="a map-style dataset has __len__ and __getitem__"
            )
        if len(dataset) == 0:
            raise InputError(f"{reference} is empty", rule="at least one sample")
        self.form, named = _columns(self._sample(0))
        self._kinds = {name: _encode(value)[0] for name, value in named.items() if _encode(value)[0]}
        for name, value in named.items():
            if name not in self._kinds:
                self._not_packable(0, name, value)
        self.columns = tuple(named)
        single = len(named) == 1 and self.form == "value"
        self.endings = tuple(k if single else f"{_safe(n)}.{k}" for n, k in self._kinds.items())
        if len(set(self.endings)) < len(self.endings):
            raise InputError(f"{reference}: two names differ only in case or signs", where=", ".join(named))
        self._first = sum(len(data) for _, data in self.members(0))

    def _sample(self, i: int) -> Any:
        with seeded_random(0, i):
            return call_user_code(self.dataset.__getitem__, f"sample {i} of {self.reference}", i)

    def _not_packable(self, i: int, name: str, value: Any) -> None:
        where = f"sample {i}, {name!r}"
        raise InputError(f"{self.reference} gives a {type(value).__name__}", where=where, rule=RULE)

    def __len__(self) -> int:
        return len(self.dataset)

    def sizes(self) -> np.ndarray:
        """The bytes of the first sample, for all."""
        return np.full(len(self), self._first, dtype=np.int64)

    def members(self, i: int) -> list[tuple[int, bytes]]:
        """The values of a sample."""
        form, named = _columns(self._sample(i))
        if form != self.form or tuple(named) != self.columns:
            has = f"has {', '.join(named)}, the first has {', '.join(self.columns)}"
            raise InputError(f"sample {i} of {self.reference} {has}", rule="all samples have the same columns")
        made = []
        for code, (name, value) in enumerate(named.items()):
            kind, data = _encode(value)
            if kind != self._kinds[name]:
                self._not_packable(i, name, value)
            made.append((code, data))
        return made

    def name(self, i: int) -> str:
        """The number of the sample."""
        return f"sample {i}"

    def facts(self) -> Iterable[str]:
        """The digest of the file, and the number of samples."""
        yield f"{self.reference} {self._digest} {len(self)}"


def _columns(sample: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(sample, Mapping) and sample:
        return "dict", {str(k): v for k, v in sample.items()}
    if isinstance(sample, tuple | list) and len(sample) > 0:
        names = ("input", "target") if len(sample) == 2 else tuple(f"value{k}" for k in range(len(sample)))
        return "tuple", dict(zip(names, sample, strict=True))
    return "value", {"value": sample}


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name.lower())[:40]


def _encode(value: Any) -> tuple[str, bytes]:
    """(ending, bytes), or two empty values for what cannot be packed."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.dtype == torch.bfloat16:
            return "", b""
        value = value.detach().cpu().numpy()
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        try:
            array = np.asarray(value)
        except OverflowError:
            return "", b""
        return ("npy", array_bytes(array)) if array.dtype.kind in "biufc" else ("", b"")
    if isinstance(value, str):
        return "txt", value.encode("utf-8", "surrogatepass")
    return ("bin", value) if isinstance(value, bytes) else ("", b"")
