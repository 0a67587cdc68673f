"""The coordinator: an update rule for workers that are processes. They wait here, and their gradients are kept here.

The threads of the workers' connections call it, and the thread that applies updates takes them from it. A worker that
fails is replaced while a thread may still answer its old connection. So every join of a worker has a number, its epoch,
and every assignment of a task has one: what an old connection requests or delivers never counts as its successor's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ...comm.remote_calls import CallerGone
from ...schedules import GradientTask, UpdateRule, WeightUpdate
from .worker_buffers import Buffers, mean

Key = tuple[int, int]
"""Step and slice of a gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class HandedIn:
    """A worker's gradient, and the sums of its loss."""

    tensors: list[torch.Tensor]
    loss: float
    weight: float
    samples: int
    """Samples of the whole batch."""
    own_samples: int
    """Samples that it was computed on."""
    tokens: int = 0
    unreached: tuple[int, ...] = ()
    """The parameters without a gradient, by their numbers."""
    memory_bytes: float = 0.0
    grad_norm: float = 0.0
    """Where the worker has applied it by itself."""
    versions: tuple[int, ...] = ()
    """Versions of the weights it was computed on, by server."""
    number: int = 0
    """Number of the assignment."""
    times: tuple[float, ...] = ()
    """Seconds of the task by phase, as in a row of `step_times`; empty while the worker warms up."""
    buffers: Buffers = field(default_factory=dict)
    """Buffers of the worker's model that its steps change."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The answer to a worker that asks for a task."""

    task: GradientTask | None
    """None if there is nothing more to do."""
    version: int
    """Version of the weights to compute on."""
    number: int = -1
    """Counts the tasks that were handed out."""
    ahead: tuple[int, ...] = ()
    """The batches that are reserved for the worker."""


class Superseded(CallerGone):
    """Raised for a call on an old connection of a worker that has joined again since."""


class Coordinator:
    """Hands out tasks, collects gradients, and passes complete updates on, in their order."""

    def __init__(self, rule: UpdateRule, workers: int) -> None:
        self.rule, self._workers = rule, workers
        self.applied = rule.version
        """Updates that the weights have."""
        self._changed = threading.Condition()
        self._gradients: dict[Key, HandedIn] = {}
        self._updates: deque[WeightUpdate] = deque()
        self._stopped = False
        self._left: set[int] = set()
        self._epochs: dict[int, int] = {}
        """Number of times each worker has joined."""
        self._assigned: dict[int, int] = {}
        """By worker, the number of the task that it computes."""
        self._handed_out = 0
        self._void: list[int] = []
        """Numbers of assignments whose gradients will not be applied, since the last update."""
        self._waited = [0.0] * workers
        """Seconds that each worker has waited for a task since the last record."""
        self._buffers: dict[int, Buffers] = {}
        """The last buffers of each worker."""
        self._gone: set[int] = set()
        """Lost workers whose buffers belong to an update that may not be applied yet."""

    # -- workers

    def join(self, worker: int) -> int:
        """A worker is here, for the first time or again; its epoch, which it names when it asks for a task.

        All updates so far have been applied then: the server has the running statistics after them.
        """
        with self._changed:
            self._lose(worker)  # its old connection may not be known to be gone yet
            self.rule.join(worker)
            self._epochs[worker] = epoch = self._epochs.get(worker, 0) + 1
            self._changed.notify_all()
            version = self.rule.version
            while self.applied < version and not self._stopped:
                self._wait_as(worker, epoch)
            return epoch

    def lose(self, worker: int) -> None:
        """A worker's connection is gone: others compute what it had."""
        with self._changed:
            self._lose(worker)
            self._changed.notify_all()

    def _lose(self, worker: int) -> None:
        if worker in self.rule.workers:
            self.rule.lose(worker)
        if (number := self._assigned.pop(worker, None)) is not None:
            self._void.append(number)
        self._gone.add(worker)

    def leave(self, worker: int) -> None:
        """A worker has nothing more to do."""
        with self._changed:
            self._left.add(worker)
            self._changed.notify_all()

    def next_task(self, worker: int, epoch: int, *, ahead: int = 0) -> Assignment:
        """The worker's next task, once it may have one and the weights it is computed on are there.

        `ahead`: batches that it loads ahead.
        """
        start = time.monotonic()
        with self._changed:
            self._check_epoch(worker, epoch)
            task, number = None, -1
            reserved: tuple[int, ...] = ()
            while not (self._stopped or self.rule.done) and (task := self.rule.next_task(worker)) is None:
                self._wait_as(worker, epoch)
            if task is not None:
                self._assigned[worker] = number = self._handed_out
                self._handed_out += 1
                reserved = self.rule.reserve(worker, ahead)
            version = self.rule.version
            while self.applied < version and not self._stopped:
                self._wait_as(worker, epoch)
            if worker < self._workers:  # not one that has joined later
                self._waited[worker] += time.monotonic() - start
            return Assignment(None if self._stopped else task, self.applied, number, reserved)

    def _wait_as(self, worker: int, epoch: int) -> None:
        """Wait for a change, on a connection of this epoch of a worker."""
        self._changed.wait()
        self._check_epoch(worker, epoch)

    def _check_epoch(self, worker: int, epoch: int) -> None:
        if self._epochs.get(worker) != epoch or worker not in self.rule.workers:
            raise Superseded(f"worker {worker} has joined again, or is lost")

    def hand_in(self, worker: int, gradient: HandedIn) -> bool:
        """A worker's gradient; whether it counts."""
        with self._changed:
            if self._assigned.get(worker) != gradient.number:
                raise Superseded(f"worker {worker} does not compute task {gradient.number} any more")
            if self._stopped:
                self.rule.counts.dropped += 1
                return False
            del self._assigned[worker]
            self._keep_buffers(worker, gradient.buffers)
            task = self.rule.running[worker]
            self.rule.read(worker, min(gradient.versions))
            dropped = self.rule.counts.dropped
            self._gradients[task.step, task.slice] = gradient
            self._updates += self.rule.hand_in(worker)
            counts = self.rule.counts.dropped == dropped
            if not counts:
                self._gradients.pop((task.step, task.slice), None)
                self._void.append(gradient.number)
            self._changed.notify_all()
            return counts

    def _keep_buffers(self, worker: int, buffers: Buffers) -> None:
        for lost in self._gone:
            self._buffers.pop(lost, None)
        self._gone.clear()
        if buffers:
            self._buffers[worker] = buffers

    # -- the thread that applies updates

    def mean_buffers(self) -> Buffers:
        """The mean of the workers' last buffers, without those of lost workers."""
        with self._changed:
            parts = [self._buffers[worker] for worker in sorted(self._buffers)]
        return mean(parts)

    def next_update(self) -> WeightUpdate | None:
        """The next update; None once all have been made, or the run is to stop and no gradient waits to be applied."""
        with self._changed:
            while not self._updates and not self.rule.done and not self._stopped:
                self._changed.wait()
            return self._updates.popleft() if self._updates else None

    def gradients_of(self, update: WeightUpdate) -> list[HandedIn]:
        """The gradients of an update, in its order; they are forgotten here."""
        with self._changed:
            return [self._gradients.pop((c.task.step, c.task.slice)) for c in update.contributions]

    def take_void(self) -> tuple[int, ...]:
        """Numbers of assignments whose gradients will not be applied, since the last call."""
        with self._changed:
            void, self._void = tuple(self._void), []
        return void

    def mark_applied(self) -> None:
        """The weights have one more update."""
        with self._changed:
            self.applied += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Give out no more tasks."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait_for_workers(self, seconds: float, *, absent: float) -> None:
        """Wait until all workers have left: some seconds for those that are here, some for those that may come back."""
        now = time.monotonic()
        with self._changed:
            while not self._left >= set(range(self._workers)):
                end = now + (absent if self._left >= self.rule.workers else seconds)
                if (left := end - time.monotonic()) <= 0:
                    return
                self._changed.wait(left)

    def take_waits(self) -> tuple[float, ...]:
        """Seconds that each worker waited since the last call."""
        with self._changed:
            waited, self._waited = self._waited, [0.0] * self._workers
        return tuple(waited)

    def accounts(self) -> dict[str, int]:
        """Gradients by outcome."""
        with self._changed:
            counts = self.rule.counts
            return {"applied": counts.applied, "dropped": counts.dropped, "lost": counts.lost}

    # -- for a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Batches not yet applied before the latest applied one: the position in the data does not show them."""
        with self._changed:
            applied = set(getattr(self.rule, "applied", ())) - {u.step for u in self._updates}
            return {"missing": [step for step in range(max(applied, default=-1) + 1) if step not in applied]}
