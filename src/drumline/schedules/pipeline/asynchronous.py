"""Schedules that do not drain between batches: PipeDream, and PipeDream-2BW with two versions of the weights.

Stage s of p runs 1F1B with at most p-s micro-batches in flight, and begins the next batch where another schedule would
wait for the last backwards of this one. Updates (U) are actions among the others. A forward runs on the newest weights,
and its backward on the same, which the stage stores until then.

pipedream      A batch is one micro-batch, and its update follows its backward at once. While a batch is on its way
               through the later stages and back, stage s applies the p-1-s batches before it: that is its staleness.
pipedream-2bw  A batch is m >= p micro-batches, and the update of batch t follows the last forward of batch t+1 on every
               stage. By then all stages have its gradients, so their norm is known. Batch t+1 runs on the weights
               before that update: the staleness is 1 on every stage, and two versions are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .order import Action, Pipeline, at_least_one

PIPEDREAM, PIPEDREAM_2BW = "pipedream", "pipedream-2bw"
ASYNCHRONOUS = (PIPEDREAM, PIPEDREAM_2BW)
"""Schedules that do not drain between batches."""


def update_delay(name: str, stages: int, stage: int) -> int:
    """Updates between the weights that a stage computes a gradient on and those it applies it to, in steady state."""
    return stages - 1 - stage if name == PIPEDREAM else min(1, stages - 1)


def expected_staleness(name: str, stages: int, batch: int) -> tuple[int, ...]:
    """By stage, of the `batch`-th batch since the pipeline was empty: the first one meets fresh weights."""
    return tuple(min(batch, update_delay(name, stages, s)) for s in range(stages))


def joins_updates(name: str, stages: int) -> bool:
    """Whether an update waits for the gradients of all stages."""
    return name == PIPEDREAM_2BW and stages > 1


class AsynchronousLane:
    """The actions of one stage, batch by batch: those up to a batch's last forward when it is fed, the rest later.

    Micro-batches are numbered from 0 since the pipeline was empty.
    """

    def __init__(self, name: str, stages: int, stage: int) -> None:
        self.stage = stage
        self._behind = stages - 1 - stage
        """Micro-batches in flight between an F and the B that follows it."""
        self._joint = joins_updates(name, stages)
        self._forwards = self._backwards = 0
        self._ends: deque[int] = deque()
        """The last micro-batches of the batches that are not applied yet."""

    def feed(self, micros: int) -> list[Action]:
        """The next batch of `micros` micro-batches: its forwards, and the work that earlier ones left until then."""
        at_least_one(micros=micros)
        actions: list[Action] = []
        self._ends.append(self._forwards + micros - 1)
        for _ in range(micros):
            actions.append(Action("F", self.stage, self._forwards))
            self._forwards += 1
            if self._forwards - self._backwards > self._behind:
                self._backward(actions)
        if self._joint and len(self._ends) > 1:
            while self._backwards <= self._ends[0]:  # after a batch of fewer micro-batches than stages
                self._backward(actions)
            self._update(actions)
        return actions

    def drain(self) -> list[Action]:
        """The rest of everything that was fed; afterwards the pipeline is empty."""
        actions: list[Action] = []
        while self._backwards < self._forwards:
            self._backward(actions)
        while self._ends:
            self._update(actions)
        self._forwards = self._backwards = 0
        return actions

    def _backward(self, actions: list[Action]) -> None:
        actions.append(Action("B", self.stage, self._backwards))
        self._backwards += 1
        if not self._joint and self._backwards > self._ends[0]:
            self._update(actions)

    def _update(self, actions: list[Action]) -> None:
        actions.append(Action("U", self.stage, self._ends.popleft()))


def batches_in_flight(name: str, stages: int, batches: Sequence[int]) -> Pipeline:
    """Some batches, given by their numbers of micro-batches, through a pipeline that is empty before and after."""
    at_least_one(stages=stages, batches=len(batches))
    lanes = []
    for stage in range(stages):
        lane = AsynchronousLane(name, stages, stage)
        lanes.append((*(action for micros in batches for action in lane.feed(micros)), *lane.drain()))
    return Pipeline(name, stages, sum(batches), tuple(lanes), joint_updates=joins_updates(name, stages))


def pipedream(stages: int, micros: int) -> Pipeline:
    """One batch after the other; each is one micro-batch.

    Stage s keeps the activations of at most stages - s batches, and as many versions of its weights.
    """
    return batches_in_flight(PIPEDREAM, stages, [1] * micros)


def pipedream_2bw(stages: int, micros: int) -> Pipeline:
    """Batches of as many micro-batches as stages, the fewest; the last batch has what is left.

    Stage s keeps the activations of at most stages - s micro-batches, and two versions of its weights.
    """
    at_least_one(stages=stages, micros=micros)
    whole, rest = divmod(micros, stages)
    return batches_in_flight(PIPEDREAM_2BW, stages, [*[stages] * whole, *([rest] if rest else [])])
