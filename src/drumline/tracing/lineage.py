"""Follows the values that a layer's forward makes: who wrote each of them, and which operators belong together when
some of them are computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from .kinds import tensors

_MESSAGES = ("c10d", "_c10d_functional")


class Lineage:
    """Told every operator of one layer's forward, in order."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._always: set[int] = set()
        self._writer: dict[int, int] = {}
        """The operator that made a storage; storages from outside have none."""
        self._readers: dict[int, list[int]] = {}
        self._random: int | None = None

    def __len__(self) -> int:
        return len(self._parent)

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor]:
        """One more operator; gives those of its results that it made anew."""
        number = len(self._parent)
        self._parent.append(number)
        read = {key_of(t) for t in tensors(args)} | {key_of(t) for t in tensors(kwargs)}
        results = tensors(out)
        made = {key_of(t): t for t in results if key_of(t) not in read}
        message = func.namespace in _MESSAGES
        written = read if message else {key_of(t) for t in written_by(func, args, kwargs)}
        if message or torch.Tag.inplace_view in func.tags:  # a tensor that was kept would not have the new shape
            self._always.add(number)
        for key in written:
            self._write(key, number)
        if made or written or not results:  # a view reads nothing by itself
            for key in read - written:
                self._readers.setdefault(key, []).append(number)
        for key in made:  # the place of a storage that is gone may be taken again
            self._writer[key], self._readers[key] = number, []
        if draws(func, args, kwargs):
            # computed again, they draw the same numbers only if none of them is left out
            if self._random is not None:
                self._join(number, self._random)
            self._random = number
        return list(made.values())

    def group(self, number: int) -> int:
        """The first operator of those that an operator belongs to."""
        while self._parent[number] != number:
            number = self._parent[number]
        return number

    def writer(self, t: torch.Tensor) -> int | None:
        """The operator that made a tensor, if it was made here."""
        return self._writer.get(key_of(t))

    def bound(self) -> set[int]:
        """Groups that cannot be kept."""
        return {self.group(i) for i in self._always}

    def _write(self, key: int, number: int) -> None:
        """A storage is written in place."""
        if key not in self._writer:
            self._always.add(number)  # a buffer or an input, which this layer does not own
            return
        first = self._writer[key]
        if any(self.group(r) != self.group(first) for r in self._readers[key]):
            self._always.add(first)  # somebody read what it was before
        self._join(number, first)

    def _join(self, a: int, b: int) -> None:
        low, high = sorted((self.group(a), self.group(b)))
        self._parent[high] = low


def key_of(t: torch.Tensor) -> int:
    """What tensors that share memory share."""
    return int(t.untyped_storage()._cdata)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes in place, by its schema."""
    places = _written(func)
    if not places:
        return []
    given: Iterable[Any] = (args[i] if i < len(args) else kwargs.get(name) for i, name in places)
    return tensors(list(given))


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers. Fused attention does only if it drops something."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    place = _place(func, "dropout_p")
    if place is None:
        return True
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


@functools.cache
def _place(func: Any, name: str) -> int | None:
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == name), None)
