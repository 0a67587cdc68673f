"""Zero-bubble schedules: the backward for weights (W), which no other rank needs, fills idle time.

H1 and H2 have one stage per rank. V has two, in the shape of a V: stage s is on rank s on the way down and on rank
2p-1-s on the way up. So the last stage is on rank 0, next to the first one, and all ranks need equally much memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from .order import KINDS, Action, Kind, Pipeline, at_least_one


def zero_bubble_h1(stages: int, micros: int) -> Pipeline:
    """1F1B in which stage s runs W s micro-batches after B.

    Every stage keeps as many activations as stage 0 of 1F1B, the last ones for W alone. In the cool-down, B never waits
    for W, and W fills the bubble: with f, b, w seconds per stage, (stages - 1)(f + b - w) is left.
    """
    at_least_one(stages=stages, micros=micros)
    return Pipeline("zero-bubble", stages, micros, tuple(_lane(stages, micros, s, 1) for s in range(stages)))


def zero_bubble_h2(stages: int, micros: int) -> Pipeline:
    """H1 with twice the forwards before the first backward: 2 stages - 1 activations on every rank.

    With f = b = w and enough micro-batches, no rank waits between its first action and its last. Ranks start one after
    the other, so this saves time only if a rank begins its next step as soon as it has ended this one. No plan has it:
    the engine's ranks update together. It is compared with published runs (`validation.schedule_ratios`).
    """
    at_least_one(stages=stages, micros=micros)
    return Pipeline("zero-bubble-2p", stages, micros, tuple(_lane(stages, micros, s, 2) for s in range(stages)))


def _lane(stages: int, micros: int, stage: int, ahead: int) -> tuple[Action, ...]:
    """A stage that runs `ahead` forwards in advance for each stage after it, and W behind B as far for each before."""
    warm, behind = min(ahead * (stages - 1 - stage), micros), ahead * stage
    # Warm-up: as 1F1B.
    lane = [Action("F", stage, i) for i in range(warm)]
    for i in range(micros):
        # Steady state while there are forwards; cool-down: B, and W until the next B.
        if warm + i < micros:
            lane.append(Action("F", stage, warm + i))
        lane.append(Action("B", stage, i))
        if i >= behind:
            lane.append(Action("W", stage, i - behind))
    return (*lane, *(Action("W", stage, i) for i in range(max(0, micros - behind), micros)))


@lru_cache(maxsize=64)
def zero_bubble_v(ranks: int, micros: int) -> Pipeline:
    """Greedy schedule for F, B and W of equal length, under a memory limit.

    No rank keeps more than 2 * ranks activations of its (half as large) stages: the memory of 1F1B on rank 0. With
    micros > ranks and equal times it ends after 6 * micros + ranks - 1 actions. No schedule on these ranks ends sooner:
    the last rank starts after ranks - 1 others and has 6 actions per micro-batch.
    """
    at_least_one(ranks=ranks, micros=micros)
    return Pipeline("zero-bubble", 2 * ranks, micros, tuple(map(tuple, _Greedy(ranks, micros).run())))


@dataclass(slots=True)
class _Rank:
    """State of one rank."""

    stages: tuple[int, int]
    """On the way down, and on the way up."""
    last: dict[Kind, int] = field(default_factory=dict)
    """Kind -> stage of the last such action."""
    activations: int = 0
    """Activations between F and W."""


class _Greedy:
    """In every unit of time each rank runs the most urgent action that is ready.

    While forwards are left, W runs first, because it frees memory; then F, as long as there is memory, so that a rank
    has work when others are late; then B; and W when nothing else is ready. The two stages alternate. That costs
    nothing when all actions are equally long, and otherwise keeps the bubble from growing with the micro-batches.

    It cannot deadlock. On the way down a rank leaves one slot free, so the oldest micro-batch finds a slot on its way
    up, and a backward needs none.
    """

    def __init__(self, ranks: int, micros: int) -> None:
        self.slots, self.micros, self.end = 2 * ranks, micros, 2 * ranks - 1
        self.ranks = [_Rank((r, self.end - r)) for r in range(ranks)]
        self.lanes: list[list[Action]] = [[] for _ in range(ranks)]
        self.done = {(kind, stage): 0 for kind in KINDS for stage in range(2 * ranks)}
        """(kind, stage) -> micro-batches done; each kind runs them in order."""

    def run(self) -> list[list[Action]]:
        """Run to the end; return the lanes."""
        left = 6 * len(self.ranks) * self.micros
        while left:
            chosen = [self._choose(rank) for rank in self.ranks]
            assert any(chosen), "no action is ready"
            for rank, action in enumerate(chosen):
                if action is not None:
                    self._do(rank, action)
                    left -= 1
        return self.lanes

    def _choose(self, rank: _Rank) -> Action | None:
        forwards_left = any(self.done["F", stage] < self.micros for stage in rank.stages)
        kinds: tuple[Kind, ...] = ("W", "F", "B") if forwards_left else ("B", "W")
        return next((action for kind in kinds if (action := self._next(kind, rank))), None)

    def _next(self, kind: Kind, rank: _Rank) -> Action | None:
        """The next action of this kind; if both stages are ready they alternate, up first."""
        ready = [stage for stage in rank.stages if self._is_ready(kind, stage, rank)]
        if not ready:
            return None
        stage = ready[-1]
        if len(ready) == 2 and kind != "W" and rank.last.get(kind) == stage:
            stage = ready[0]
        return Action(kind, stage, self.done[kind, stage])

    def _is_ready(self, kind: Kind, stage: int, rank: _Rank) -> bool:
        """Whether the inputs of the next action of this kind exist, and a slot for a forward."""
        i = self.done[kind, stage]
        if kind == "W":
            return i < self.done["B", stage]
        if kind == "B":
            back = self.micros if stage == self.end else self.done["B", stage + 1]
            return i < min(back, self.done["F", stage])
        free = self.slots - rank.activations - (stage == rank.stages[0])
        return free > 0 and i < (self.micros if stage == 0 else self.done["F", stage - 1])

    def _do(self, rank: int, action: Action) -> None:
        self.lanes[rank].append(action)
        self.done[action.kind, action.stage] += 1
        self.ranks[rank].last[action.kind] = action.stage
        self.ranks[rank].activations += {"F": 1, "B": 0, "W": -1}[action.kind]
