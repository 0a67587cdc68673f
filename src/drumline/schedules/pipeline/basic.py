"""Schedules with the backward in one piece: naive, GPipe, 1F1B, and interleaved 1F1B."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from .order import Action, Kind, Pipeline, at_least_one


def naive(stages: int, micros: int) -> Pipeline:
    """One micro-batch after the other through all stages: one rank is busy at a time.

    Every stage keeps the activations of one micro-batch. The bubble is (stages - 1) / stages of the time.
    """
    at_least_one(stages=stages, micros=micros)
    lanes = (tuple(Action(kind, s, i) for i in range(micros) for kind in ("F", "B")) for s in range(stages))
    return Pipeline("naive", stages, micros, tuple(lanes))


def gpipe(stages: int, micros: int) -> Pipeline:
    """All forwards, then all backwards.

    Every stage keeps the activations of all micro-batches. With equal stages the bubble is that of 1F1B. Backwards run
    in the order of the forwards, so gradients are accumulated in the same order as in all other schedules.
    """
    at_least_one(stages=stages, micros=micros)
    lanes = (tuple(Action(kind, s, i) for kind in ("F", "B") for i in range(micros)) for s in range(stages))
    return Pipeline("gpipe", stages, micros, tuple(lanes))


def one_f_one_b(stages: int, micros: int) -> Pipeline:
    """Warm-up forwards, then one forward and one backward alternately, then the remaining backwards.

    Stage s keeps the activations of at most min(stages - s, micros) micro-batches. With equal stages the bubble is
    (stages - 1) / (micros + stages - 1) of the time.
    """
    at_least_one(stages=stages, micros=micros)
    return Pipeline("1f1b", stages, micros, tuple(_one_f_one_b(stages, micros, s) for s in range(stages)))


def _one_f_one_b(stages: int, micros: int, stage: int) -> tuple[Action, ...]:
    warm = min(stages - 1 - stage, micros)
    # Warm-up: enough forwards that the first backward arrives when they are done.
    lane = [Action("F", stage, i) for i in range(warm)]
    # Steady state: a forward, then the backward that frees its memory.
    for i in range(micros - warm):
        lane += [Action("F", stage, warm + i), Action("B", stage, i)]
    # Cool-down: the backwards of the warm-up.
    return (*lane, *(Action("B", stage, i) for i in range(micros - warm, micros)))


def interleaved(ranks: int, micros: int, virtual: int) -> Pipeline:
    """1F1B over `virtual` stages per rank, so that the first backward starts sooner; stage s is on rank s mod ranks.

    Micro-batches run in groups of at least `ranks`: a group runs through the first stage of a rank, then its second,
    and so on. While the first micro-batch of a group is on other ranks, a rank runs the rest of the group. With equal
    stages the bubble is 1/virtual of that of 1F1B, at the price of more activations and messages.
    """
    at_least_one(ranks=ranks, micros=micros, virtual=virtual)
    if virtual == 1:
        return replace(one_f_one_b(ranks, micros), name="interleaved")
    groups = _groups(ranks, micros)
    lanes = (_lane(ranks, rank, virtual, groups) for rank in range(ranks))
    return Pipeline("interleaved", ranks * virtual, micros, tuple(lanes))


def _groups(ranks: int, micros: int) -> list[range]:
    """As many nearly equal groups as have at least `ranks` members; one if there are too few."""
    count = max(1, micros // ranks)
    bounds = [micros * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _lane(ranks: int, rank: int, virtual: int, groups: list[range]) -> tuple[Action, ...]:
    def turn(kind: Kind, chunks: range) -> list[Action]:
        return [Action(kind, c * ranks + rank, i) for group in groups for c in chunks for i in group]

    forwards, backwards = turn("F", range(virtual)), turn("B", range(virtual - 1, -1, -1))
    # The first group must reach the last stage of the rank before a backward can arrive; from there it takes two
    # actions per rank to the last rank and back.
    warm = min((virtual - 1) * max(map(len, groups)) + 2 * (ranks - 1 - rank), len(forwards))
    lane = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        lane += [forward, backward]
    return (*lane, *backwards[len(forwards) - warm :])
