"""The orders with one stage a rank and the backward in one piece: naive, GPipe, 1F1B."""

from __future__ import annotations

from .order import Action, Pipeline, at_least_one


def naive(stages: int, micros: int) -> Pipeline:
    """One micro-batch after the other, forward and backward through all stages: one rank is busy at a time.

    Every stage holds the activations of one micro-batch. The bubble is (stages - 1) / stages of the time.
    """
    at_least_one(stages=stages, micros=micros)
    lanes = (tuple(Action(kind, s, i) for i in range(micros) for kind in ("F", "B")) for s in range(stages))
    return Pipeline("naive", stages, micros, tuple(lanes))


def gpipe(stages: int, micros: int) -> Pipeline:
    """All forwards, then all backwards.

    Every stage holds the activations of all micro-batches. With equal stages the bubble is that of 1F1B. Backwards go
    in the order of the forwards, so gradients are added up in the order in which all other orders add them.
    """
    at_least_one(stages=stages, micros=micros)
    lanes = (tuple(Action(kind, s, i) for kind in ("F", "B") for i in range(micros)) for s in range(stages))
    return Pipeline("gpipe", stages, micros, tuple(lanes))


def one_f_one_b(stages: int, micros: int) -> Pipeline:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left.

    Stage s holds the activations of at most min(stages - s, micros) micro-batches. With equal stages the bubble is
    (stages - 1) / (micros + stages - 1) of the time.
    """
    at_least_one(stages=stages, micros=micros)
    return Pipeline("1f1b", stages, micros, tuple(_one_f_one_b(stages, micros, s) for s in range(stages)))


def _one_f_one_b(stages: int, micros: int, stage: int) -> tuple[Action, ...]:
    warm = min(stages - 1 - stage, micros)
    # Warm-up: enough forwards that the first backward arrives when they are done.
    lane = [Action("F", stage, i) for i in range(warm)]
    # Steady state: a forward, then the backward that frees what the forward took.
    for i in range(micros - warm):
        lane += [Action("F", stage, warm + i), Action("B", stage, i)]
    # Cool-down: the backwards of the warm-up.
    return (*lane, *(Action("B", stage, i) for i in range(micros - warm, micros)))
