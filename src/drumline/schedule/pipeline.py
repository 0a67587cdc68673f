"""Pipeline orders, each written once: which rank runs which stage on which micro-batch, in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError, nearest

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage on one micro-batch: forward (F), backward (B), or the part of the backward that gives weights (W)."""

    kind: Kind
    """Where an order has W actions, B is the backward for the stage's input alone; else B is all of it."""
    stage: int
    micro: int

    def needs(self, stages: int) -> tuple[Action, ...]:
        """What must be done before, by the data that flows: never more than two actions."""
        if self.kind == "F":
            return (Action("F", self.stage - 1, self.micro),) if self.stage else ()
        if self.kind == "W":
            return (Action("B", self.stage, self.micro),)
        own = Action("F", self.stage, self.micro)
        return (own, Action("B", self.stage + 1, self.micro)) if self.stage + 1 < stages else (own,)

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An order: what each rank runs, first to last. Sends between stages do not block the sender."""

    name: str
    stages: int
    micros: int
    """Micro-batches."""
    lanes: tuple[tuple[Action, ...], ...]
    """By rank. A rank may hold several stages; all actions of a stage are in one lane."""

    @property
    def splits_backward(self) -> bool:
        """Whether the backward for weights is apart."""
        return any(a.kind == "W" for lane in self.lanes for a in lane)

    def homes(self) -> dict[int, int]:
        """Stage -> the rank that first runs it."""
        homes: dict[int, int] = {}
        for rank, lane in enumerate(self.lanes):
            for action in lane:
                homes.setdefault(action.stage, rank)
        return homes

    def label(self, action: Action) -> str:
        """`F0`, or `F0@2` with the stage where a rank holds several."""
        return str(action) if self.stages == len(self.lanes) else f"{action}@{action.stage}"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.stages} stages on {len(self.lanes)} ranks, {self.micros} micro-batches, "
            f"{sum(map(len, self.lanes))} actions"
        )


def one_f_one_b(stages: int, micros: int) -> Pipeline:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left.

    Stage s holds the activations of at most min(stages - s, micros) micro-batches. With equal stages the bubble is
    (stages - 1) / (micros + stages - 1) of the time.
    """
    _check(stages, micros)
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


ORDERS: dict[str, Callable[[int, int], Pipeline]] = {"1f1b": one_f_one_b}
"""The plan notation's `schedule` -> (stages, micro-batches) -> order."""


def pipeline_order(name: str, stages: int, micros: int) -> Pipeline:
    """The order by the name that a plan gives it."""
    if name not in ORDERS:
        raise InputError(
            f"unknown pipeline order {name!r}", rule=f"known: {', '.join(ORDERS)}", fix=nearest(name, ORDERS)
        )
    return ORDERS[name](stages, micros)


def _check(stages: int, micros: int) -> None:
    for word, n in (("stages", stages), ("micro-batches", micros)):
        if n < 1:
            raise InputError(f"a pipeline of {n} {word}", rule=f"{word} >= 1")
