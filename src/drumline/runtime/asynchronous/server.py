"""A parameter server: holds a share of the weights and the optimizer, applies updates, and answers workers.

The first server has the coordinator. It decides which gradients make an update and sends that decision to the other
servers, so all of them apply the same updates in the same order. A step's gradient norm is summed over the servers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...comm.rank_status import rank_status
from ...comm.remote_calls import CallerGone, CallServer, Values
from ...core.errors import StoppedByGuard
from ..engine import Engine
from ..strategies.server_shard import ServerShard
from ..training.checkpoint_policy import TrainingCheckpoints
from .worker_buffers import most_bytes


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
        most = most_bytes(self.shard.layout, engine.model)
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
            plain: Values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
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
            square = engine.read_numbers(engine.update.square().reshape(1))[0]
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
