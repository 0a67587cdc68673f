"""Fingerprints of data, which ranks compare: each must have the same data, or must have a slice of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import DrumlineError
from .seeding import seeded_random
from .sources import DataSource, MapSource


def fingerprint_of(source: DataSource, seed: int) -> int:
    """A number that is equal on ranks with equal data: of the length, the first order and the first sample.

    0 where the first sample is another one each time, or cannot be read: then ranks have nothing to compare.
    """
    try:
        values = []
        for _ in range(2):
            with seeded_random(seed):
                values.append(digest([source.length, _first_order(source), source.first_sample()]))
    except DrumlineError:  # training names the sample
        return 0
    return values[0] if values[0] == values[1] else 0


def _first_order(source: DataSource) -> list[int]:
    return [] if isinstance(source, MapSource) else source.samples(0)


def digest(value: Any) -> int:
    """62 bits of the content of nested tensors, arrays, numbers and texts; of anything else only the type counts."""
    sha = hashlib.sha256()
    _add(sha, value)
    return int.from_bytes(sha.digest()[:8], "big") >> 2 or 1


def _add(sha: Any, value: Any) -> None:
    sha.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        sha.update(str((tuple(plain.shape), plain.dtype)).encode())
        if plain.numel():
            sha.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _add(sha, key)
            _add(sha, value[key])
    elif isinstance(value, tuple | list):
        for item in value:
            _add(sha, item)
    elif hasattr(value, "tobytes"):  # an array
        sha.update(value.tobytes())
    elif isinstance(value, int | float | complex | str | bytes | bool | None):
        sha.update(repr(value).encode())
