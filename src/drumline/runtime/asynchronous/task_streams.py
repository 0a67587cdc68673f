"""The batches of a worker's tasks, loaded ahead by worker processes: its own slice of every step, or whole batches in
the order in which the coordinator has reserved them for this worker. Tasks of lost workers are loaded when they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...datasets.ahead_loader import AheadLoader
from ...datasets.loader import Loader
from ...datasets.stream import RankBatch, Stream
from ...schedules import GradientTask

if TYPE_CHECKING:
    from .worker import WorkerEngine


class TaskStreams:
    """The batches of tasks."""

    def __init__(self, engine: WorkerEngine, *, ahead: bool = True) -> None:
        self._engine = engine
        self._others: dict[tuple[int, int], Stream] = {}
        pin = engine.device.type == "cuda"
        self._whole = AheadLoader(self._stream(0, 1), pin=pin)
        self._own: Loader | None = None
        self._pin, self.ahead = pin, self._whole.depth if ahead else 0
        """Batches that the coordinator should reserve."""

    def batch(self, task: GradientTask, reserved: Sequence[int] = ()) -> RankBatch:
        """The batch, or the slice of it, of a task; `reserved` are the batches that come next."""
        engine = self._engine
        if task.slices == 1 and self.ahead:
            return self._whole.batch(task.step, reserved)
        stream = self._stream(task.slice, task.slices)
        if task.slices > 1 and task.slice == engine.worker and engine.stream.workers:
            self._own = self._own or Loader(stream, pin=self._pin)
            return self._own.batch(task.step)
        return stream.batch(task.step)

    def _stream(self, slice: int, slices: int) -> Stream:
        engine, key = self._engine, (slice, slices)
        if key not in self._others:
            dataset, micro = engine.stream.dataset, engine.plan.micro
            self._others[key] = Stream(engine.job, dataset, dp=slices, index=slice, micro=micro)
        return self._others[key]

    def close(self) -> None:
        """End the data-loading processes."""
        self._whole.close()
        if self._own is not None:
            self._own.close()
