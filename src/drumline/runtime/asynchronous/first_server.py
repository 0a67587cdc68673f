"""The first parameter server: it has the coordinator, tells the other servers which updates to apply, and reports them.

It also averages the running statistics of the workers, for checkpoints, evaluation, and workers that join.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.remote_calls import CallClient, CallerGone, Values
from ...schedules import WeightUpdate
from ..engine import Engine
from ..strategies.server_shard import ServerShard, unreached_names
from ..training.checkpoint_policy import TrainingCheckpoints
from .coordinator import Coordinator, HandedIn
from .server import ParameterServer, UpdateCommand
from .worker_buffers import flat, put
from .worker_comparison import WorkerComparison, data_seconds

LEAVE_SECONDS = 600.0
"""Seconds in which workers may evaluate and leave after the last update."""
RETURN_SECONDS = 20.0
"""Seconds in which a worker that has failed may come back after the last update."""

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """An update as it was made."""

    update: WeightUpdate
    versions: tuple[tuple[int, ...], ...]
    """By gradient and server: the version of the weights it was computed on."""


class FirstServer(ParameterServer):
    """The server with the coordinator."""

    def __init__(
        self,
        engine: Engine,
        coordinator: Coordinator,
        *,
        local: bool,
        checkpoints: TrainingCheckpoints | None,
        emit: Emit,
        restored: Collection[str] = (),
    ) -> None:
        self.coordinator, self._emit = coordinator, emit
        self._id = secrets.token_hex(8)
        """Tells its counts from those of the server that it replaces."""
        self._trained_buffers = set(restored)
        """Names of the buffers that steps have changed, in this run or (`restored`) before its checkpoint."""
        self._others: list[CallClient] = []
        self._pool = ThreadPoolExecutor(max_workers=max(1, engine.plan.server_processes - 1))
        self._begun = self._last = time.perf_counter()
        self.seconds: list[float] = []
        """Between updates, without the loading of data."""
        self._data: list[float] = []
        """Seconds of loading data, for each update."""
        self._comparison = WorkerComparison(engine.plan.dp)
        self.history: list[RecordedUpdate] | None = None
        """Every update, if somebody wants them."""
        super().__init__(engine, index=0, local=local, checkpoints=checkpoints)

    def connect(self, others: list[CallClient]) -> None:
        """The other servers are reached by these."""
        self._others = others

    def answer(
        self, caller: int, name: str, values: Values, tensors: list[torch.Tensor]
    ) -> tuple[Values, Sequence[torch.Tensor]]:
        """Answer a worker."""
        if name == "join":
            epoch = self.coordinator.join(caller)
            names, buffers = self._read_buffers(values["buffers"])
            return {"epoch": epoch, "buffers": names, **self.greeting()}, buffers
        if name == "next":
            return self._next_task(caller, values)
        if name == "hand_in":
            return self._hand_in(caller, values, tensors), ()
        if name == "leave":
            self.coordinator.leave(caller)
            return {}, ()
        return super().answer(caller, name, values, tensors)

    def _next_task(self, worker: int, values: Values) -> tuple[Values, Sequence[torch.Tensor]]:
        assignment, with_weights = (
            self.coordinator.next_task(worker, values["epoch"], ahead=values["ahead"]),
            values["weights"],
        )
        task = assignment.task
        read, weights = self.read_weights(assignment.version) if with_weights else ({"version": assignment.version}, [])
        answer = {
            "task": None if task is None else [task.step, task.slice, task.slices],
            "number": assignment.number,
            "ahead": assignment.ahead,
            "vectors": len(weights),
        }
        if task is None:
            names, buffers = self._read_buffers()
            return answer | read | self.farewell() | {"buffers": names}, [*weights, *buffers]
        return answer | read, weights

    def _read_buffers(self, more: Collection[str] = ()) -> tuple[list[str], list[torch.Tensor]]:
        """Names and values of the buffers that steps have changed, and of some more."""
        with self._weights_lock:
            names = self._trained_buffers.union(more)
            own = {n: b.clone() for n, b in self.engine.model.named_buffers() if n in names}
        return list(own), list(flat(own).values())

    def greeting(self) -> Values:
        """The answer to a worker that joins."""
        return {}

    def farewell(self) -> Values:
        """The answer to workers when there is no more work."""
        warm = self.engine.plan.dp if len(self.seconds) > self.engine.plan.dp else 0
        step, data = (sum(row[warm:]) / max(1, len(row[warm:])) for row in (list(self.seconds), list(self._data)))
        accounts = self.coordinator.accounts()
        return {"preempted": self.stopping, "step_seconds": step, "data_seconds": data, "accounts": accounts}

    def lost(self, caller: int) -> None:
        """A worker's connection is gone."""
        self.coordinator.lose(caller)

    def take_buffers(self) -> None:
        """Average the workers' running statistics, for checkpoints and evaluation."""
        means = self.coordinator.mean_buffers()
        put(self.engine.model, means)
        self._trained_buffers.update(means)

    def _hand_in(self, worker: int, values: Values, tensors: list[torch.Tensor]) -> Values:
        vectors = values["vectors"]
        own = tensors[:vectors]
        if values["pushed"]:
            with self._changed:
                own = self._pushed.pop(values["number"], [])  # none from an old connection of a worker
        gradient = HandedIn(
            own,
            values["loss"],
            values["weight"],
            values["samples"],
            values["own_samples"],
            values["tokens"],
            tuple(values["unreached"]),
            values["memory_bytes"],
            values["grad_norm"],
            tuple(values["versions"]),
            values["number"],
            tuple(values["times"]),
            dict(zip(values["buffers"], tensors[vectors:], strict=True)),
        )
        return {"counts": self.coordinator.hand_in(worker, gradient)}

    def serve(self) -> None:
        """Apply updates until all are made, or the run is asked to stop."""
        try:
            while (update := self.coordinator.next_update()) is not None:
                gradients = self.coordinator.gradients_of(update)
                command = command_of(update, gradients, self.shard, self.coordinator.take_void())
                if self._others:
                    self._forget(command.void)
                sent = [self._pool.submit(self._send_update, other, command) for other in self._others]
                stop = self.apply(command, [g.tensors for g in gradients])
                for future in sent:
                    future.result()
                self.coordinator.mark_applied()
                self._report(update, command, gradients)
                if stop:
                    self.coordinator.stop()
        finally:
            self.coordinator.stop()
        self.coordinator.wait_for_workers(LEAVE_SECONDS, absent=RETURN_SECONDS)
        for other in self._others:
            with contextlib.suppress(CallerGone):  # it may close before its answer is sent
                other.call("end")

    @staticmethod
    def _send_update(other: CallClient, command: UpdateCommand) -> None:
        other.call("update", {f: getattr(command, f) for f in UpdateCommand.__slots__})

    def _report(self, update: WeightUpdate, command: UpdateCommand, gradients: Sequence[HandedIn]) -> None:
        if self.history is not None:
            self.history.append(RecordedUpdate(update, tuple(g.versions for g in gradients)))
        engine = self.engine
        now = time.perf_counter()
        whole, data = now - self._last, data_seconds([g.times for g in gradients], engine.plan)
        data = min(data, whole)
        self.seconds.append(whole - data)
        self._data.append(data)
        self._last = now
        for contribution, gradient in zip(update.contributions, gradients, strict=True):
            self._comparison.add(contribution.worker, gradient.times)
        saved = engine.saver.last if engine.saver is not None else None
        record: dict[str, Any] = {
            "step": update.number,
            "loss": command.loss,
            "grad_norm": engine.grad_norm or gradients[0].grad_norm,
            "seconds": self.seconds[-1],
            "samples": sum(g.own_samples for g in gradients),
            "tokens": sum(g.tokens for g in gradients),
            "memory_bytes": max(g.memory_bytes for g in gradients),
            "data_seconds": data,
            "probed": False,
            "skipped": engine.skipped,
            "note": self.note,
            "checkpoint_age": max(0.0, time.time() - saved.stat().st_mtime) if saved and saved.exists() else None,
            "staleness": tuple(c.staleness for c in update.contributions),
            "wait_seconds": self.coordinator.take_waits(),
            "worker": update.contributions[0].worker if update.contributions[0].task.slices == 1 else None,
            "server": self._id,
            **{key: count for key, count in self.coordinator.accounts().items() if key != "applied"},
        }
        if (slowest := self._comparison.slowest()) is not None:
            record["slowest"] = slowest
        self._emit(record)


def command_of(
    update: WeightUpdate, gradients: Sequence[HandedIn], shard: ServerShard, void: tuple[int, ...] = ()
) -> UpdateCommand:
    """An update with its numbers: workers divide by all samples of the batch, so a missing slice is made up for."""
    weight = sum(g.weight for g in gradients)
    loss = sum(g.loss for g in gradients) / weight if weight else math.nan
    factor = gradients[0].samples / weight if weight else math.nan
    missing = unreached_names(shard.layout.ranges, iter([g.unreached for g in gradients]))
    return UpdateCommand(
        update.number,
        update.step,
        tuple(g.number for g in gradients),
        tuple(c.weight for c in update.contributions),
        factor,
        loss,
        tuple(sorted(missing)),
        tuple(c.worker for c in update.contributions),
        void,
    )
