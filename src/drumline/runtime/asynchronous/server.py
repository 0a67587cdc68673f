"""A parameter server: holds a share of the weights and the optimizer, applies updates, and answers workers.

The first server has the coordinator. It decides which gradients make an update and sends that decision to the other
servers, so all of them apply the same updates in the same order. A step's gradient norm is summed over the servers.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...comm.rank_status import rank_status
from ...comm.remote_calls import CallClient, CallerGone, CallServer, Values
from ...core.errors import StoppedByGuard
from ...schedules import WeightUpdate
from ..engine import Engine
from ..strategies.server_shard import ServerShard, unreached_names
from ..training.checkpoint_policy import TrainingCheckpoints
from .coordinator import Coordinator, HandedIn

LEAVE_SECONDS = 600.0
"""Seconds in which workers may evaluate and leave after the last update."""
RETURN_SECONDS = 20.0
"""Seconds in which a worker that has failed may come back after the last update."""

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class UpdateCommand:
    """An update as all servers apply it."""

    number: int
    step: int
    gradients: tuple[int, ...]
    """By the numbers of their assignments."""
    weights: tuple[float, ...]
    """The factor on each gradient."""
    factor: float
    """On their sum."""
    loss: float
    unreached: tuple[str, ...]
    workers: tuple[int, ...]
    void: tuple[int, ...] = ()
    """Assignments whose gradients will not be applied: their workers are lost, or were too late."""


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """An update as it was made."""

    update: WeightUpdate
    versions: tuple[tuple[int, ...], ...]
    """By gradient and server: the version of the weights it was computed on."""


class ParameterServer:
    """One server: its engine, its connections, and the updates."""

    def __init__(self, engine: Engine, *, index: int, local: bool, checkpoints: TrainingCheckpoints | None) -> None:
        assert isinstance(engine.strategy, ServerShard)
        self.engine, self.shard, self.index = engine, engine.strategy, index
        self.checkpoints = checkpoints
        self._weights_lock = threading.Lock()
        """Held while the weights change, or are copied for a worker."""
        self._changed = threading.Condition()
        self._pushed: dict[int, list[torch.Tensor]] = {}
        """With several servers: gradients that no update has used yet, by the numbers of their assignments."""
        self._void: set[int] = set()
        """Assignments whose gradients are not wanted, should they still come."""
        self.version = engine.position
        self._skipped_in_a_row = 0
        self.note = ""
        self.stopping = False
        """Whether the run was asked to stop."""
        self.ended = threading.Event()
        most = 2 * self.shard.layout.bytes + (64 << 20)
        self.calls = CallServer(self.answer, local=local, most_bytes=most, on_lost=self.lost)

    # -- calls, each in a thread of its caller

    def answer(
        self, caller: int, name: str, values: Values, tensors: list[torch.Tensor]
    ) -> tuple[Values, Sequence[torch.Tensor]]:
        """Answer a worker, or the first server."""
        if name == "push":
            self._keep(values["number"], tensors)
            return {}, ()
        if name == "pull":
            return self.read_weights(values["version"])
        if name == "update":
            plain = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
            return self._update_from_first(UpdateCommand(**plain))
        if name == "end":
            self._end()
            return {}, ()
        raise ValueError(f"no call {name!r}")

    def lost(self, caller: int) -> None:
        """A caller's connection is gone."""
        if caller < 0:  # the first server: it will not come back without us
            self._end()

    def _end(self) -> None:
        self.ended.set()
        with self._changed:
            self._changed.notify_all()

    def _keep(self, number: int, gradient: list[torch.Tensor]) -> None:
        """Keep this server's share of a gradient until an update uses it."""
        with self._changed:
            if number in self._void:
                self._void.remove(number)
                return
            self._pushed[number] = gradient
            self._changed.notify_all()

    def _forget(self, numbers: Sequence[int]) -> None:
        """Drop gradients that no update will use, now or when they come."""
        with self._changed:
            for number in numbers:
                if self._pushed.pop(number, None) is None:
                    self._void.add(number)

    def read_weights(self, version: int) -> tuple[Values, list[torch.Tensor]]:
        """A copy of this server's weights, not older than a version."""
        with self._changed:
            while self.version < version and not self.ended.is_set():
                self._changed.wait(1.0)
        with self._weights_lock:
            return {"version": self.version}, [w.detach().clone() for w in self.shard.weights]

    def _update_from_first(self, command: UpdateCommand) -> tuple[Values, Sequence[torch.Tensor]]:
        with self._changed:
            while not all(number in self._pushed for number in command.gradients):
                if self.ended.is_set():
                    raise CallerGone("the first server is gone")
                self._changed.wait()
            gradients = [self._pushed.pop(number) for number in command.gradients]
        self._forget(command.void)
        self.apply(command, gradients)
        return {}, ()

    # -- updates

    @torch.no_grad()
    def apply(self, command: UpdateCommand, gradients: list[list[torch.Tensor]]) -> bool:
        """Apply one update; all servers do so together. Whether the run is to stop after it."""
        engine = self.engine
        rank_status().step(command.step)
        self.note = ""
        with engine.phase("optimizer"), self._weights_lock:
            self.shard.set_gradients(_weighted_sum(gradients, command.weights), frozenset(command.unreached))
            square = engine.read_numbers(engine.update.square())[0]
            engine.grad_norm = command.factor * math.sqrt(square) if square >= 0 else math.nan
            if math.isfinite(command.loss) and math.isfinite(engine.grad_norm):
                engine.update.apply(command.factor, engine.grad_norm, engine.gradients_ready)
                engine.update.finish()
                engine.steps += 1
                self._skipped_in_a_row = 0
                self.note = engine.guard.spike(command.loss)
            else:
                self.shard.drop_gradients()
                self._skip(command)
            engine.position += 1
            self.take_buffers()
            self.version += 1  # under the lock: who copies the weights reads their version with them
        with self._changed:
            self._changed.notify_all()
        return self.after_update()

    def after_update(self) -> bool:
        """Save if it is due. Whether the run is to stop: then updates that are on their way are still applied."""
        if self.checkpoints is not None and not self.stopping:
            self.stopping = self.checkpoints.after_step()
        return self.stopping

    def take_buffers(self) -> None:
        """Take over the workers' running statistics; the first server has them."""

    def _skip(self, command: UpdateCommand) -> None:
        """A gradient is not finite: skip the update, or stop the run, with the weights of the last good one saved."""
        guards = self.engine.guard.guards
        self._skipped_in_a_row += 1
        named = ", ".join(map(str, command.workers))
        what = f"batch {command.step}: loss {command.loss}, gradient norm {self.engine.grad_norm}"
        if guards.nonfinite == "skip" and self._skipped_in_a_row <= guards.patience:
            self.note = f"skipped: {what}"
            return
        if self.checkpoints is not None:
            self.checkpoints.save_good_weights()
        raise StoppedByGuard(
            what,
            where=f"worker{'s' if len(command.workers) > 1 else ''} {named}",
            rule="the loss and the gradients must be finite; the weights are those before this update",
            fix="--on-nonfinite skip, or Guards(nonfinite='skip'), skips such updates",
        )

    def serve(self) -> None:
        """Wait for the end, on servers without the coordinator."""
        self.ended.wait()


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
    ) -> None:
        self.coordinator, self._emit = coordinator, emit
        self._others: list[CallClient] = []
        self._pool = ThreadPoolExecutor(max_workers=max(1, engine.plan.server_processes - 1))
        self._begun = self._last = time.perf_counter()
        self.seconds: list[float] = []
        """Between updates."""
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
            return {"epoch": self.coordinator.join(caller), **self.greeting()}, ()
        if name == "next":
            return self._next_task(caller, values["epoch"], with_weights=values["weights"])
        if name == "hand_in":
            return self._hand_in(caller, values, tensors), ()
        if name == "leave":
            self.coordinator.leave(caller)
            return {}, ()
        return super().answer(caller, name, values, tensors)

    def _next_task(self, worker: int, epoch: int, *, with_weights: bool) -> tuple[Values, Sequence[torch.Tensor]]:
        assignment = self.coordinator.next_task(worker, epoch)
        task = assignment.task
        read, weights = self.read_weights(assignment.version) if with_weights else ({"version": assignment.version}, [])
        answer = {
            "task": None if task is None else [task.step, task.slice, task.slices],
            "number": assignment.number,
            "vectors": len(weights),
        }
        if task is None:
            weights += [b.flatten() for b in float_buffers(self.engine.model)]
            return answer | read | self.farewell(), weights
        return answer | read, weights

    def greeting(self) -> Values:
        """What a worker is told when it joins."""
        return {}

    def farewell(self) -> Values:
        """What workers are told when there is no more work."""
        steady = self.seconds[self.engine.plan.dp :] or self.seconds
        mean = sum(steady) / len(steady) if steady else 0.0
        return {"preempted": self.stopping, "step_seconds": mean, "accounts": self.coordinator.accounts()}

    def lost(self, caller: int) -> None:
        """A worker's connection is gone."""
        self.coordinator.lose(caller)

    def take_buffers(self) -> None:
        """Average the workers' running statistics, for checkpoints and evaluation."""
        buffers = self.coordinator.buffers
        if buffers:
            for mine, mean in zip(float_buffers(self.engine.model), average_buffers(buffers), strict=True):
                mine.copy_(mean.view(mine.shape))

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
        )
        if tensors[vectors:]:
            self.coordinator.buffers[worker] = tensors[vectors:]
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
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        engine = self.engine
        saved = engine.saver.last if engine.saver is not None else None
        record: dict[str, Any] = {
            "step": update.number,
            "loss": command.loss,
            "grad_norm": engine.grad_norm or gradients[0].grad_norm,
            "seconds": self.seconds[-1],
            "samples": sum(g.own_samples for g in gradients),
            "tokens": sum(g.tokens for g in gradients),
            "memory_bytes": max(g.memory_bytes for g in gradients),
            "data_seconds": 0.0,
            "probed": False,
            "skipped": engine.skipped,
            "note": self.note,
            "checkpoint_age": max(0.0, time.time() - saved.stat().st_mtime) if saved and saved.exists() else None,
            "staleness": tuple(c.staleness for c in update.contributions),
            "wait_seconds": self.coordinator.take_waits(),
            "worker": update.contributions[0].worker if update.contributions[0].task.slices == 1 else None,
            **{key: count for key, count in self.coordinator.accounts().items() if key != "applied"},
        }
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


def _weighted_sum(gradients: list[list[torch.Tensor]], weights: Sequence[float]) -> list[torch.Tensor]:
    """The sum of gradients, vector by vector, in the memory of the first."""
    total = gradients[0]
    if weights[0] != 1.0:
        for t in total:
            t.mul_(weights[0])
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        for t, more in zip(total, gradient, strict=True):
            t.add_(more, alpha=weight)
    return total


def float_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that replicas may have different values of: running statistics."""
    return [b for b in model.buffers() if b.is_floating_point()]


def average_buffers(parts: Mapping[int, Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The mean of the workers' buffers."""
    columns = zip(*parts.values(), strict=True)
    return [torch.stack([t.double() for t in column]).mean(0).to(column[0].dtype) for column in columns]
