"""The form of a pipeline schedule: actions in lanes, one lane per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...core.errors import InputError

Kind = Literal["F", "B", "W", "U"]
KINDS: tuple[Kind, ...] = ("F", "B", "W", "U")

Skips = tuple[tuple[int, int], ...]
"""Pairs of stages (from, to), to > from + 1, between which a value and its gradient are sent directly."""


@dataclass(frozen=True, slots=True)
class Action:
    """One stage on one micro-batch: forward (F), backward (B), or the backward for weights (W); or its update (U)."""

    kind: Kind
    """In schedules with W actions, B is the backward for the input of the stage alone; otherwise all of it.

    Schedules that drain after every batch have no U: the update follows the last action.
    """
    stage: int
    micro: int
    """Of an update: the last micro-batch of the batch whose gradients it applies."""

    def needs(self, stages: int) -> tuple[Action, ...]:
        """Actions whose results this one needs: at most two.

        Values that skip stages add nothing: their producer ran before the previous stage, along the chain.
        """
        if self.kind == "F":
            return (Action("F", self.stage - 1, self.micro),) if self.stage else ()
        if self.kind in ("W", "U"):
            return (Action("B", self.stage, self.micro),)
        own = Action("F", self.stage, self.micro)
        return (own, Action("B", self.stage + 1, self.micro)) if self.stage + 1 < stages else (own,)

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule: the actions of each rank in order. Sends between stages do not block the sender."""

    name: str
    stages: int
    micros: int
    """Micro-batches."""
    lanes: tuple[tuple[Action, ...], ...]
    """By rank. A rank may have several stages; all actions of a stage are in one lane."""
    joint_updates: bool = False
    """Whether the update of a batch waits for its gradients on all stages, because it needs their norm."""

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions whose results an action needs. The first stage is the last to have the gradients of a batch."""
        joint = self.joint_updates and action.kind == "U" and action.stage
        return (*action.needs(self.stages), *((Action("B", 0, action.micro),) if joint else ()))

    @property
    def has_updates(self) -> bool:
        """Whether updates are actions among others: the pipeline does not drain between batches."""
        return any(a.kind == "U" for a in self.lanes[0])

    @property
    def splits_backward(self) -> bool:
        """Whether the backward for weights is a separate action."""
        return any(a.kind == "W" for lane in self.lanes for a in lane)

    def homes(self) -> dict[int, int]:
        """Stage -> the rank that runs it."""
        homes: dict[int, int] = {}
        for rank, lane in enumerate(self.lanes):
            for action in lane:
                homes.setdefault(action.stage, rank)
        return homes

    def label(self, action: Action) -> str:
        """`F0`, or `F0@2` with the stage where a rank has several."""
        return str(action) if self.stages == len(self.lanes) else f"{action}@{action.stage}"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.stages} stages on {len(self.lanes)} ranks, {self.micros} micro-batches, "
            f"{sum(map(len, self.lanes))} actions"
        )


def at_least_one(**counts: int) -> None:
    """Refuse counts below one."""
    for word, n in counts.items():
        if n < 1:
            word = word.replace("micros", "micro-batches").replace("virtual", "stages per rank")
            raise InputError(f"a pipeline of {n} {word}", rule=f"{word} >= 1")


def check_skips(skips: Skips, stages: int) -> None:
    """Refuse pairs that are not skips: a skip goes to a later stage, beyond the next one."""
    for start, end in skips:
        if not (0 <= start < start + 1 < end < stages):
            raise InputError(
                f"a skip from stage {start} to stage {end} of {stages}",
                rule="a skip goes to a later stage, beyond the next one",
            )
