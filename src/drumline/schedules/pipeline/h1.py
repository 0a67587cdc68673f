"""The zero-bubble order H1: the backward for weights (W), which no other rank needs, fills what would be idle."""

from __future__ import annotations

from .order import Action, Pipeline, at_least_one


def zero_bubble_h1(stages: int, micros: int) -> Pipeline:
    """1F1B whose stage s is s micro-batches late with its weights.

    Stage s of 1F1B holds the activations of stages - s micro-batches; here every stage holds as many as stage 0 does
    there, the last ones for their weights alone. Backwards for the input run through the cool-down without waiting
    for any weights, and the weights fill what was the bubble: with f, b, w per stage, (stages - 1)(f + b - w) is left.
    """
    at_least_one(stages=stages, micros=micros)
    return Pipeline("zero-bubble", stages, micros, tuple(_h1(stages, micros, s) for s in range(stages)))


def _h1(stages: int, micros: int, stage: int) -> tuple[Action, ...]:
    warm = min(stages - 1 - stage, micros)
    # Warm-up: as 1F1B.
    lane = [Action("F", stage, i) for i in range(warm)]
    for i in range(micros):
        # Steady state, while there are forwards; cool-down: a backward, and weights until the next one comes.
        if warm + i < micros:
            lane.append(Action("F", stage, warm + i))
        lane.append(Action("B", stage, i))
        if i >= stage:
            lane.append(Action("W", stage, i - stage))
    return (*lane, *(Action("W", stage, i) for i in range(max(0, micros - stage), micros)))
