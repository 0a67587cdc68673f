"""Hogwild: workers of one host update weights and optimizer state in shared memory, without locks.

The first server is only the coordinator here: it owns the memory, hands out batches, counts updates and saves. The
memory is an anonymous file that workers open through /proc, so nothing is left behind. Updates of two workers may
overwrite each other's elements; with one worker the result is that of one device.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...comm.rank_status import rank_status
from ...comm.remote_calls import Values
from ...datasets.stream import RankBatch
from ..core.forward_backward import forward_backward, read_sums
from ..engine import Engine
from .first_server import FirstServer
from .server import UpdateCommand
from .worker import WorkerEngine

_ALIGNED = 64
"""Bytes to which tensors in the shared memory are aligned."""


class HogwildServer(FirstServer):
    """The coordinator, with the memory of weights and optimizer state."""

    def __init__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        states = optimizer_states(engine)
        tensors = [*engine.strategy.weights, *states]  # type: ignore[attr-defined]  # a ServerShard
        self._file = os.memfd_create("drumline-weights")
        size = sum(_up(t.nbytes) for t in tensors)
        os.ftruncate(self._file, max(1, size))
        self._size = size
        share_tensors(tensors, self._file, size)
        engine.strategy.link()  # type: ignore[attr-defined]
        super().__init__(engine, *args, **kwargs)

    def greeting(self) -> Values:
        """Where the memory is, and how many updates it has."""
        return {"memory": f"/proc/{os.getpid()}/fd/{self._file}", "bytes": self._size}

    def _next_task(self, worker: int, values: Values) -> tuple[Values, Sequence[torch.Tensor]]:
        """A task without weights: they are in the shared memory."""
        return super()._next_task(worker, values | {"weights": False})

    @torch.no_grad()
    def apply(self, command: UpdateCommand, gradients: list[list[torch.Tensor]]) -> bool:
        """Count an update that a worker has made."""
        engine = self.engine
        rank_status().step(command.step)
        self.note = engine.guard.spike(command.loss)
        engine.steps += 1
        engine.position += 1
        if engine.schedule is not None:
            engine.schedule.step()
        with self._weights_lock:
            self.take_buffers()
        with self._changed:
            self.version += 1
            self._changed.notify_all()
        return self.after_update()


class HogwildWorker(WorkerEngine):
    """A worker whose parameters and optimizer state are in the coordinator's memory."""

    def connect(self) -> None:
        """Connect, and map the memory."""
        super().connect()
        file = os.open(self.greeting["memory"], os.O_RDWR | os.O_CLOEXEC)
        try:
            # into fresh tensors: those of an earlier memory may still be mapped
            tensors = [*self.weights, *optimizer_states(self)]
            share_tensors(tensors, file, self.greeting["bytes"], keep=False)
            for r, p in zip(self.layout.ranges, self._parameters, strict=True):
                p.data = self.layout.of_dtype(self.weights, r).view(r.shape)
        finally:
            os.close(file)

    def step(self, batch: Any) -> float:
        """Compute the gradient of the current task and apply it to the shared weights."""
        assert isinstance(batch, RankBatch)
        self.position, self.data_index = self.task.step, self.task.slice
        rank_status().step(self.task.step)
        self.record.begin(self.task.step)
        self.buffer_snapshot.save()
        while self.schedule is not None and self.schedule.last_epoch < self.versions[0]:
            self.schedule.step()
        sums = forward_backward(self, batch)
        loss, factor = read_sums(self, sums)
        loss_sum, weight, _, _ = self.read_numbers(sums.values)
        if self.guard.is_finite(loss, self.grad_norm):
            with self.phase("optimizer"):
                self.update.apply(factor, self.grad_norm, self.gradients_ready)
        else:
            self.guard.handle_nonfinite(self, batch, loss, self.grad_norm)
        self.strategy.drop_gradients()
        with self.phase("communication"):
            self._hand_in(batch, loss_sum, weight, [])
        self.record.end()
        return loss

    def _shares(self) -> list[list[torch.Tensor]]:
        return [[]]


def optimizer_states(engine: Engine) -> list[torch.Tensor]:
    """All tensors of the optimizer's state, made now, in the order of the pieces."""
    make_states(engine)
    optimizer = engine.optimizer
    return [
        value
        for piece in engine.pieces
        for _, value in sorted(optimizer.state[piece.value].items())
        if isinstance(value, torch.Tensor)
    ]


@torch.no_grad()
def make_states(engine: Engine) -> None:
    """Make the optimizer create its state, as before the first step, by a step with learning rate 0."""
    optimizer = engine.optimizer
    if all(optimizer.state.get(p.value) for p in engine.pieces):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for piece in engine.pieces:
        piece.value.grad = torch.zeros_like(piece.value)
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if not isinstance(group["lr"], torch.Tensor) else torch.zeros_like(group["lr"])
    before = [p.value.detach().clone() for p in engine.pieces]
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for piece, old in zip(engine.pieces, before, strict=True):
        piece.value.grad = None
        piece.value.copy_(old)
        state = optimizer.state[piece.value]
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif key == "step":
                state[key] = 0


def share_tensors(tensors: Sequence[torch.Tensor], file: int, size: int, *, keep: bool = True) -> None:
    """Move tensors into the memory of a file, with their values if `keep`, else with those that are there."""
    memory = mmap.mmap(file, max(1, size))
    for tensor, start in zip(tensors, _starts(tensors), strict=True):
        if not tensor.numel():
            continue
        shared = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        if keep:
            shared.copy_(tensor)
        tensor.data = shared


def _starts(tensors: Sequence[torch.Tensor]) -> Iterator[int]:
    at = 0
    for tensor in tensors:
        yield at
        at += _up(tensor.nbytes)


def _up(n: int) -> int:
    return -(-n // _ALIGNED) * _ALIGNED
