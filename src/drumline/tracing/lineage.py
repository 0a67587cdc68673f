"""Data flow of one layer's forward: which operator wrote each value, and what must be recomputed together."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ..torchkit.schemas import argument_names, schema_of
from ..torchkit.storages import storage_id
from .op_costs import tensors

_MESSAGES = ("c10d", "_c10d_functional")


class Lineage:
    """Receives every operator of one layer's forward, in order."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._always: set[int] = set()
        self._writer: dict[int, int] = {}
        """The operator that created a storage; storages from outside have none."""
        self._readers: dict[int, list[int]] = {}
        self._random: int | None = None

    def __len__(self) -> int:
        return len(self._parent)

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor]:
        """Add one operator; returns the results that it created."""
        number = len(self._parent)
        self._parent.append(number)
        read = {storage_key(t) for t in tensors(args)} | {storage_key(t) for t in tensors(kwargs)}
        results = tensors(out)
        made = {storage_key(t): t for t in results if storage_key(t) not in read}
        message = func.namespace in _MESSAGES
        written = read if message else {storage_key(t) for t in written_by(func, args, kwargs)}
        if message or torch.Tag.inplace_view in func.tags:  # a kept tensor would not have the new shape
            self._always.add(number)
        for key in written:
            self._write(key, number)
        if made or written or not results:  # a view alone reads nothing
            for key in read - written:
                self._readers.setdefault(key, []).append(number)
        for key in made:  # a freed storage's address may be reused
            self._writer[key], self._readers[key] = number, []
        if draws_random_numbers(func, args, kwargs):
            # recomputed, they draw the same numbers only if all of them run
            if self._random is not None:
                self._join(number, self._random)
            self._random = number
        return list(made.values())

    def group(self, number: int) -> int:
        """The first operator of the group of an operator."""
        while self._parent[number] != number:
            number = self._parent[number]
        return number

    def writer(self, t: torch.Tensor) -> int | None:
        """The operator that created a tensor, or None if it comes from outside."""
        return self._writer.get(storage_key(t))

    def always_recomputed(self) -> set[int]:
        """Groups whose results cannot be kept."""
        return {self.group(i) for i in self._always}

    def _write(self, key: int, number: int) -> None:
        """Note that a storage is written in place."""
        if key not in self._writer:
            self._always.add(number)  # a buffer or an input, not owned by this layer
            return
        first = self._writer[key]
        if any(self.group(r) != self.group(first) for r in self._readers[key]):
            self._always.add(first)  # its earlier value was read
        self._join(number, first)

    def _join(self, a: int, b: int) -> None:
        low, high = sorted((self.group(a), self.group(b)))
        self._parent[high] = low


def storage_key(t: torch.Tensor) -> int:
    """A key that is equal for tensors that share memory."""
    return storage_id(t)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes in place, by its schema."""
    places = _written(func)
    if not places:
        return []
    given: Iterable[Any] = (args[i] if i < len(args) else kwargs.get(name) for i, name in places)
    return tensors(list(given))


def draws_random_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers. Fused attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    place = _place(func, "dropout_p")
    if place is None:
        return True
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(schema_of(func).arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def _place(func: Any, name: str) -> int | None:
    return next((i for i, argument in enumerate(argument_names(func)) if argument == name), None)
