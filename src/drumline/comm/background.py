"""A thread that runs the collectives of one communicator one after the other, while the caller computes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

_Tasks = SimpleQueue["tuple[Callable[[], object], BackgroundWork] | None"]


class BackgroundWork:
    """A collective that was handed to the thread: the interface of torch's own work objects."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, *_: Any) -> bool:
        """Block until it is done; raises its error."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with it."""
        return self._future


class BackgroundThread:
    """Runs tasks in the order in which they were handed over, which is the same on every rank.

    The thread starts with the first task, ends when this object is dropped, and does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: _Tasks = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], object]) -> BackgroundWork:
        """Hand over a task."""
        work = BackgroundWork()
        self._tasks.put((task, work))
        if self._thread is None:
            # the thread knows the queue alone, so that this object can be dropped
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None)
        return work


def _serve(tasks: _Tasks) -> None:
    """Thread: run one task after the other."""
    while (item := tasks.get()) is not None:
        task, work = item
        try:
            task()
        except Exception as e:
            work.get_future().set_exception(e)
        else:
            work.get_future().set_result(None)
        del item, task, work
