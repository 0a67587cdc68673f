"""Interleaved 1F1B: every rank holds several thin stages, so the first backward comes back sooner."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from .order import Action, Kind, Pipeline, at_least_one
from .plain import one_f_one_b


def interleaved(ranks: int, micros: int, virtual: int) -> Pipeline:
    """1F1B over `virtual` stages a rank: stage s is on rank s mod ranks.

    Micro-batches go in groups of at least `ranks`: a group runs through the first stage of a rank, then through its
    second, and so on. Before the first micro-batch of a group has come round to the rank again, the rank is busy with
    the rest of the group. With equal stages the bubble is 1/virtual of 1F1B's, at more activations and messages.
    """
    at_least_one(ranks=ranks, micros=micros, virtual=virtual)
    if virtual == 1:
        return replace(one_f_one_b(ranks, micros), name="interleaved")
    groups = _groups(ranks, micros)
    lanes = (_lane(ranks, rank, virtual, groups) for rank in range(ranks))
    return Pipeline("interleaved", ranks * virtual, micros, tuple(lanes))


def _groups(ranks: int, micros: int) -> list[range]:
    """As many groups as have `ranks` members or more, as equal as can be; one, where there are too few for that."""
    count = max(1, micros // ranks)
    bounds = [micros * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _lane(ranks: int, rank: int, virtual: int, groups: list[range]) -> tuple[Action, ...]:
    def turn(kind: Kind, chunks: range) -> list[Action]:
        return [Action(kind, c * ranks + rank, i) for group in groups for c in chunks for i in group]

    forwards, backwards = turn("F", range(virtual)), turn("B", range(virtual - 1, -1, -1))
    # The first group must be in the rank's last stage before a backward can come, and from there the way to the last
    # rank and back is two actions a rank.
    warm = min((virtual - 1) * max(map(len, groups)) + 2 * (ranks - 1 - rank), len(forwards))
    lane = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        lane += [forward, backward]
    return (*lane, *backwards[len(forwards) - warm :])
