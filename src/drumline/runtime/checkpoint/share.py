"""Divides what several ranks hold alike, so that every number is written once and each rank writes as many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .view import Copies, Held


def share(held: Sequence[Held], copies: Copies) -> list[Held]:
    """This rank's part of a list that `copies.count` ranks have alike: a contiguous part of its bytes."""
    total = sum(h.tensor.numel() * h.tensor.element_size() for h in held)
    low, high = (total * i // copies.count for i in (copies.index, copies.index + 1))
    mine = []
    place = 0
    for h in held:
        first, last = (_number(bound - place, h) for bound in (low, high))
        if first < last:
            whole = first == 0 and last == h.tensor.numel()
            part = h.tensor if whole else h.tensor.detach().reshape(-1)[first:last]
            mine.append(replace(h, start=h.start + first, tensor=part))
        place += h.tensor.numel() * h.tensor.element_size()
    return mine


def _number(offset: int, h: Held) -> int:
    """The first number at or behind a byte of a tensor: the same for who ends there and who begins there."""
    return min(h.tensor.numel(), max(0, -(-offset // h.tensor.element_size())))
