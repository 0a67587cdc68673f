"""The forms of a batch: a pair (input, target), or a mapping for models that take their inputs by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import JobError


def as_pair(batch: Any) -> tuple[Any, Any]:
    """(input, target) of a batch. A mapping is both: `model(**batch)`, then `loss(output, batch)`."""
    if isinstance(batch, Mapping):
        named = dict(batch)
        return named, named
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise JobError(
            f"a batch is a {type(batch).__name__}{size}",
            rule="a batch is (input, target), {name: tensor}, or from data(); samples are pairs or mappings too",
            fix="collate=... makes one of both; an input of several tensors is a tuple: ((a, b), target)",
        )
    return batch[0], batch[1]
