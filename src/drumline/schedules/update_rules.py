"""Update rules of training with a coordinator, as state machines without time and tensors: which worker computes what
next, which gradients make an update, how stale each is. Servers run them, the simulator replays them, tests prove them.

Workers ask for a task (`next_task`), compute its gradient, and hand it in (`hand_in`). A task is one slice of the batch
of one step, or a whole batch. The version of the weights is the number of updates so far; the staleness of a gradient
is the number of updates between the weights it was computed on and the weights it is applied to.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final


@dataclass(frozen=True, slots=True, order=True)
class GradientTask:
    """A gradient to compute: of one slice of a batch."""

    step: int
    """The batch, by its number in the job's order."""
    slice: int = 0
    slices: int = 1
    """Slices of the batch; 1: the task is the whole batch."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A gradient that counts in an update."""

    worker: int
    task: GradientTask
    staleness: int
    weight: float = 1.0
    """By which the gradient is multiplied: less than 1 if stale gradients are damped."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One optimizer step."""

    number: int
    """The version of the weights before it."""
    step: int
    """The batch whose gradients it applies."""
    contributions: tuple[Contribution, ...]
    """In the order of their slices."""
    missing: int = 0
    """Slices of the batch that were not waited for."""


@dataclass(slots=True)
class _Computing:
    """A task that a worker computes."""

    task: GradientTask
    version: int
    """The weights it is computed on."""


@dataclass(slots=True)
class RuleCounts:
    """Gradients by outcome."""

    applied: int = 0
    """Gradients that counted in an update."""
    dropped: int = 0
    """Gradients that came too late."""
    lost: int = 0
    """Gradients that a failed worker did not deliver; their tasks were given to another."""
    waits: dict[int, int] = field(default_factory=dict)
    """How often each worker had to wait for a task."""


class UpdateRule(ABC):
    """Hands out tasks, and turns gradients into updates. Not thread-safe."""

    def __init__(self, workers: int, steps: int, *, first: int = 0, damping: str = "none") -> None:
        self.steps, self.damping = steps, damping
        self.version = first
        """Updates so far."""
        self.workers = set(range(workers))
        """The workers that take part."""
        self.counts = RuleCounts()
        self._computing: dict[int, _Computing] = {}

    @property
    def done(self) -> bool:
        """Whether every update has been made."""
        return self.version >= self.steps

    @property
    def running(self) -> Mapping[int, GradientTask]:
        """The tasks that are computed now, by worker."""
        return {worker: c.task for worker, c in self._computing.items()}

    def next_task(self, worker: int) -> GradientTask | None:
        """The next task of a worker, on the weights as they are now; None if it has to wait, or all is done."""
        assert worker in self.workers and worker not in self._computing, f"worker {worker} has a task or is lost"
        task = None if self.done else self._choose(worker)
        if task is None:
            self.counts.waits[worker] = self.counts.waits.get(worker, 0) + 1
        else:
            self._computing[worker] = _Computing(task, self.version)
        return task

    def read(self, worker: int, version: int) -> None:
        """A worker has read the weights of a later version than those it was given its task on."""
        self._computing[worker].version = max(version, self._computing[worker].version)

    def hand_in(self, worker: int) -> list[WeightUpdate]:
        """A worker's gradient is here: the updates that can be made now, in their order."""
        mine = self._computing.pop(worker)
        return self._collect(worker, mine.task, mine.version)

    def reserve(self, worker: int, count: int) -> tuple[int, ...]:
        """Steps of the tasks that the worker gets next, as far as they are known: it may load these batches ahead."""
        return ()

    def lose(self, worker: int) -> None:
        """A worker has failed: its task, if it had one, is given to another."""
        self.workers.discard(worker)
        self._release(worker)
        mine = self._computing.pop(worker, None)
        if mine is not None:
            self.counts.lost += 1
            self._give_back(mine.task)

    def join(self, worker: int) -> None:
        """A worker has come, or come back."""
        self.workers.add(worker)

    def weight_of(self, staleness: int) -> float:
        """The factor on a gradient that is this stale."""
        return 1.0 / (1 + staleness) if self.damping == "inverse" else 1.0

    def _release(self, worker: int) -> None:  # noqa: B027  # only rules that reserve have something to release
        """Nothing is reserved for a worker any more."""

    @abstractmethod
    def _choose(self, worker: int) -> GradientTask | None:
        """A task for a worker that has none."""

    @abstractmethod
    def _collect(self, worker: int, task: GradientTask, version: int) -> list[WeightUpdate]:
        """The updates that a gradient, computed on the weights of `version`, makes possible."""

    @abstractmethod
    def _give_back(self, task: GradientTask) -> None:
        """A task that no worker computes any more."""


@final
class StepRule(UpdateRule):
    """Updates are steps of the whole batch, each worker computes its slice of it, and is at most `stale` steps ahead.

    Before slice s of step t is computed, all slices of step t - stale - 1 have been applied. With stale = 0 this is
    synchronous SGD. A step does not wait for its last `backup` slices. The others compute the slices of lost workers.
    """

    def __init__(
        self, workers: int, steps: int, *, stale: int = 0, backup: int = 0, first: int = 0, damping: str = "none"
    ) -> None:
        super().__init__(workers, steps, first=first, damping=damping)
        self.slices, self.stale, self.backup = workers, stale, backup
        self._next = [first] * workers
        """The next step of each slice's own worker."""
        self._orphans: list[GradientTask] = []
        """A heap of tasks that lost workers have not done."""
        self._arrived: dict[int, dict[int, Contribution]] = {}
        """Gradients by step and slice."""
        self._versions: dict[tuple[int, int], int] = {}

    def _choose(self, worker: int) -> GradientTask | None:
        self._adopt()
        own = worker if worker < self.slices else None
        if own is not None:
            self._next[own] = max(self._next[own], self.version)  # steps that did not wait for it are past
        while self._orphans and self._orphans[0].step < self.version:
            heapq.heappop(self._orphans)
        step = self._next[own] if own is not None else self.steps
        if self._orphans and self._orphans[0].step <= min(step, self._latest):
            return heapq.heappop(self._orphans)
        if own is None or step > self._latest:
            return None
        self._next[own] += 1
        return GradientTask(step, own, self.slices)

    def reserve(self, worker: int, count: int) -> tuple[int, ...]:
        """The next steps of its slice."""
        first = max(self._next[worker], self.version) if worker < self.slices else self.steps
        return tuple(range(first, min(first + count, self.steps)))

    @property
    def _latest(self) -> int:
        """The latest step that may be computed now."""
        return min(self.version + self.stale, self.steps - 1)

    def _adopt(self) -> None:
        """Make tasks of the slices whose workers are lost, as far as they may be computed now."""
        for s in range(self.slices):
            if s not in self.workers:
                start = max(self._next[s], self.version)
                for step in range(start, self._latest + 1):
                    heapq.heappush(self._orphans, GradientTask(step, s, self.slices))
                self._next[s] = max(start, self._latest + 1)

    def _collect(self, worker: int, task: GradientTask, version: int) -> list[WeightUpdate]:
        if task.step < self.version:
            self.counts.dropped += 1
            return []
        self._arrived.setdefault(task.step, {})[task.slice] = Contribution(worker, task, 0)
        self._versions[task.step, task.slice] = version
        updates = []
        while len(self._arrived.get(self.version, ())) >= self.slices - self.backup:
            updates.append(self._update())
        return updates

    def _update(self) -> WeightUpdate:
        """The update of the current step."""
        step, arrived = self.version, self._arrived.pop(self.version)
        contributions = []
        for s, c in sorted(arrived.items()):
            staleness = step - self._versions.pop((step, s))
            contributions.append(Contribution(c.worker, c.task, staleness, self.weight_of(staleness)))
        self.version += 1
        self.counts.applied += len(contributions)
        return WeightUpdate(step, step, tuple(contributions), self.slices - len(contributions))

    def _give_back(self, task: GradientTask) -> None:
        if task.step >= self.version:
            heapq.heappush(self._orphans, task)


@final
class BatchRule(UpdateRule):
    """Every worker computes whole batches, and each gradient is an update of its own, as soon as it is there.

    Batches are handed out in the job's order, each to one worker; that of a lost worker is handed out again. A worker
    that loads ahead has its next batches reserved for it, until no others are left.
    `applied` are batches that were applied before, where a run goes on after the version `first`. With `in_turns` one
    worker computes at a time, so that nothing is stale.
    """

    def __init__(
        self,
        workers: int,
        steps: int,
        *,
        first: int = 0,
        applied: frozenset[int] | None = None,
        damping: str = "none",
        in_turns: bool = False,
    ) -> None:
        super().__init__(workers, steps, first=first, damping=damping)
        self._in_turns = in_turns
        past = frozenset(range(first)) if applied is None else applied
        self._open = [step for step in range(steps) if step not in past]
        """A heap of the batches that no worker has."""
        self._reserved: dict[int, list[int]] = {}
        """By worker, the heap of the batches that it gets next."""
        self.applied = set(past)
        """The batches that have been applied."""

    def _choose(self, worker: int) -> GradientTask | None:
        if self._in_turns and self._computing:
            return None
        heaps = [heap for heap in (self._open, self._reserved.get(worker, [])) if heap]
        if not heaps:  # the end is near: take over what another worker has not begun
            heaps = [heap for heap in self._reserved.values() if heap]
        return GradientTask(heapq.heappop(min(heaps))) if heaps else None

    def reserve(self, worker: int, count: int) -> tuple[int, ...]:
        own = self._reserved.setdefault(worker, [])
        while self._open and len(own) < count and not self._in_turns:
            heapq.heappush(own, heapq.heappop(self._open))
        return tuple(sorted(own))

    def _release(self, worker: int) -> None:
        for step in self._reserved.pop(worker, ()):
            heapq.heappush(self._open, step)

    def _collect(self, worker: int, task: GradientTask, version: int) -> list[WeightUpdate]:
        staleness = self.version - version
        contribution = Contribution(worker, task, staleness, self.weight_of(staleness))
        update = WeightUpdate(self.version, task.step, (contribution,))
        self.version += 1
        self.applied.add(task.step)
        self.counts.applied += 1
        return [update]

    def _give_back(self, task: GradientTask) -> None:
        heapq.heappush(self._open, task.step)


def update_rule(
    mode: str,
    workers: int,
    steps: int,
    *,
    stale: int = 0,
    backup: int = 0,
    damping: str = "none",
    first: int = 0,
    applied: frozenset[int] | None = None,
    in_turns: bool = False,
) -> UpdateRule:
    """The rule of a `sync` word: `server`, `stale` (with its number), `async` or `hogwild`."""
    if mode in ("async", "hogwild"):
        return BatchRule(workers, steps, first=first, applied=applied, damping=damping, in_turns=in_turns)
    assert mode in ("server", "stale"), mode
    return StepRule(workers, steps, stale=stale, backup=backup, first=first, damping=damping)
