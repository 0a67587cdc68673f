"""The zero-bubble order in the shape of a V: two stages a rank, found by a greedy simulation under a cap of memory.

Stage s is on rank s on the way down and on rank 2p-1-s on the way up. So the last stage is on rank 0, where the first
one is: a backward begins where it is needed last, and the ranks need equally much memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from .order import KINDS, Action, Kind, Pipeline, at_least_one


@lru_cache(maxsize=64)
def zero_bubble_v(ranks: int, micros: int) -> Pipeline:
    """Greedy, for F, B and W that take equally long.

    No rank holds more than 2 * ranks activations of its (half as large) stages: as much memory as 1F1B takes on rank
    0. With micros > ranks and equal times it ends after 6 * micros + ranks - 1 actions. No order on these ranks can end
    sooner: the last rank begins behind ranks - 1 others and has 6 actions a micro-batch.
    """
    at_least_one(ranks=ranks, micros=micros)
    return Pipeline("zero-bubble", 2 * ranks, micros, tuple(map(tuple, _Greedy(ranks, micros).run())))


@dataclass(slots=True)
class _Rank:
    """What one rank has done and holds."""

    stages: tuple[int, int]
    """On the way down, and on the way up."""
    last: dict[Kind, int] = field(default_factory=dict)
    """Kind -> the stage of the last such action."""
    held: int = 0
    """Activations: from F until W."""


class _Greedy:
    """In every unit of time each rank takes the most urgent action that it can begin.

    While forwards are left, weights come at once: they free a place. Then a forward, as long as there is a place, so
    that a rank has much in hand when others are late; then a backward; and weights when nothing else can be done. The
    two stages take turns. Turns cost nothing when all actions take equally long, and keep the order a good one when
    they do not: without them the bubble grows with the number of micro-batches.

    It cannot get stuck. On the way down a rank leaves one place free, so the oldest micro-batch finds a place on its
    way up, and a backward needs none.
    """

    def __init__(self, ranks: int, micros: int) -> None:
        self.places, self.micros, self.end = 2 * ranks, micros, 2 * ranks - 1
        self.ranks = [_Rank((r, self.end - r)) for r in range(ranks)]
        self.lanes: list[list[Action]] = [[] for _ in range(ranks)]
        self.done = {(kind, stage): 0 for kind in KINDS for stage in range(2 * ranks)}
        """(kind, stage) -> micro-batches; each kind takes them in order."""

    def run(self) -> list[list[Action]]:
        """To the end; the lanes."""
        left = 6 * len(self.ranks) * self.micros
        while left:
            chosen = [self._choose(rank) for rank in self.ranks]
            assert any(chosen), "nothing can be done"
            for rank, action in enumerate(chosen):
                if action is not None:
                    self._do(rank, action)
                    left -= 1
        return self.lanes

    def _choose(self, rank: _Rank) -> Action | None:
        forwards_left = any(self.done["F", stage] < self.micros for stage in rank.stages)
        kinds: tuple[Kind, ...] = ("W", "F", "B") if forwards_left else ("B", "W")
        return next((found for kind in kinds if (found := self._next(kind, rank))), None)

    def _next(self, kind: Kind, rank: _Rank) -> Action | None:
        """The next action of this kind, of the stage whose turn it is if both could: up first."""
        able = [stage for stage in rank.stages if self._can(kind, stage, rank)]
        if not able:
            return None
        stage = able[-1]
        if len(able) == 2 and kind != "W" and rank.last.get(kind) == stage:
            stage = able[0]
        return Action(kind, stage, self.done[kind, stage])

    def _can(self, kind: Kind, stage: int, rank: _Rank) -> bool:
        """Whether what the stage's next action of this kind needs is there, and a place for a forward."""
        i = self.done[kind, stage]
        if kind == "W":
            return i < self.done["B", stage]
        if kind == "B":
            back = self.micros if stage == self.end else self.done["B", stage + 1]
            return i < min(back, self.done["F", stage])
        free = self.places - rank.held - (stage == rank.stages[0])
        return free > 0 and i < (self.micros if stage == 0 else self.done["F", stage - 1])

    def _do(self, rank: int, action: Action) -> None:
        self.lanes[rank].append(action)
        self.done[action.kind, action.stage] += 1
        self.ranks[rank].last[action.kind] = action.stage
        self.ranks[rank].held += {"F": 1, "B": 0, "W": -1}[action.kind]
