"""What a pipeline order is: actions in lanes, one lane a rank. The values that every order and every reader share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...core.errors import InputError

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")

Skips = tuple[tuple[int, int], ...]
"""Pairs of stages (from, to), to > from + 1, where a value goes directly and its gradient comes directly back."""


@dataclass(frozen=True, slots=True)
class Action:
    """One stage on one micro-batch: forward (F), backward (B), or the part of the backward that gives weights (W)."""

    kind: Kind
    """Where an order has W actions, B is the backward for the stage's input alone; else B is all of it."""
    stage: int
    micro: int

    def needs(self, stages: int) -> tuple[Action, ...]:
        """What must be done before, by the data that flows: never more than two actions.

        A value that skips stages adds nothing: what its giver did lies behind the stage before, along the chain.
        """
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


def at_least_one(**counts: int) -> None:
    """Refuse a pipeline of nothing."""
    for word, n in counts.items():
        if n < 1:
            word = word.replace("micros", "micro-batches").replace("virtual", "stages a rank")
            raise InputError(f"a pipeline of {n} {word}", rule=f"{word} >= 1")


def check_skips(skips: Skips, stages: int) -> None:
    """Refuse a pair that is no skip: values go to later stages, and the next one is served by the chain."""
    for start, end in skips:
        if not (0 <= start < start + 1 < end < stages):
            raise InputError(
                f"a skip from stage {start} to stage {end} of {stages}",
                rule="a skip goes to a later stage, beyond the next one",
            )
