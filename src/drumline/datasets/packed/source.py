"""The interface of what can be packed: numbered samples of named columns, each column a few bytes with an ending."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import InputError

LARGEST_SAMPLE = 2**31
"""Bytes of one column of one sample, at most: it is held in memory."""
_LISTED = 10
"""Refused names that a message lists."""
_ENDING = re.compile(r"[a-z0-9_]{1,16}\Z")
PICKLED = ("pkl", "pickle", "pyd", "pt", "pth", "joblib")
"""Endings of files that run code when they are read."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Something that cannot be packed."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name!r}: {self.reason}"


class PackSource(ABC):
    """The samples to pack. `members` may be called in several processes, each after a fork."""

    columns: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    form: str = "tuple"
    classes: tuple[str, ...] = ()
    skipped: tuple[Refused, ...] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def sizes(self) -> np.ndarray:
        """Bytes of each sample, nearly: they decide which samples share a shard."""

    @abstractmethod
    def members(self, i: int) -> list[tuple[int, bytes]]:
        """A sample: for each column the number of its ending, and its bytes."""

    @abstractmethod
    def name(self, i: int) -> str:
        """Where a sample comes from, as the user would name it."""

    @abstractmethod
    def facts(self) -> Iterable[str]:
        """Facts that identify the content without reading all of it: names, sizes and times."""

    def fingerprint(self) -> str:
        """A digest of the facts."""
        digest = hashlib.sha256()
        for fact in (type(self).__name__, *self.columns, *self.endings, *self.classes, *self.facts()):
            digest.update(fact.encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()


def ending_of(name: str) -> str:
    """The ending of a file's name in lower case, or `bin` where it has none that a shard could use."""
    ending = name.rpartition(".")[2].lower() if "." in name.strip(".") else ""
    return ending if _ENDING.match(ending) else "bin"


def refuse(what: str, refused: Sequence[Refused], *, skip: bool) -> tuple[Refused, ...]:
    """Raise with the names of what cannot be packed, unless it may be skipped."""
    if refused and not skip:
        shown = "; ".join(map(str, refused[:_LISTED]))
        more = f"; and {len(refused) - _LISTED} more" if len(refused) > _LISTED else ""
        raise InputError(
            f"{what} has {len(refused)} file{'s' if len(refused) > 1 else ''} that cannot be packed",
            where=shown + more,
            rule="everything is packed, or nothing",
            fix="repair or remove them, or --skip to leave them out (they are listed in index.json)",
        )
    return tuple(refused)


def label_bytes(label: int, classes: int) -> bytes:
    """A label as text; all labels of a pack have the same length."""
    return str(label).zfill(len(str(max(1, classes) - 1))).encode()
