"""What torch gets for a call of a process group in Python: something to wait for, with a future on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .engine import Message
from .errors import GroupGaveUp, for_torch
from .spans import Span

_NO_TIMEOUT = timedelta(0)
_ENDED = threading.Event()
_ENDED.set()
_FUTURES = threading.Lock()
"""Held for a moment while a future is made or settled."""


class GroupWork(dist.Work):
    """A call under way, or done. What it leaves is in the tensors that it was given."""

    def __init__(self, outputs: Sequence[Tensor], span: Span | None = None, *, done: bool = False) -> None:
        super().__init__()
        self._outputs, self._span = outputs, span
        self._ended = _ENDED if done else threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._source = -1

    def finish(self, error: BaseException | None = None) -> None:
        """Called once, by whoever did it."""
        if self._span is not None:
            self._span.end()
        with _FUTURES:
            self._error = None if error is None else for_torch(error)
            self._ended.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until it is done; raise what went wrong."""
        if not self._ended.is_set() and not self._ended.wait(timeout.total_seconds() or None):
            raise GroupGaveUp(f"a collective is not done after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same: there are no streams on a CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that it fills."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """Whom a message came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done when the call is; made when it is asked for."""
        with _FUTURES:
            if self._future is not None:
                return self._future
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = future
            if not self._ended.is_set():
                return future
        self._settle(future)
        return future

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(list(self._outputs))


class MessageWork(GroupWork):
    """A message under way. Whoever waits for it moves it; while nobody does, the group's postman."""

    def __init__(self, tensor: Tensor, message: Message, arrived: Callable[[], None], span: Span | None) -> None:
        super().__init__([tensor], span)
        self._message, self._arrived, self._once = message, arrived, threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until it is there, or has left."""
        if not self._ended.is_set():
            try:
                self._message.wait(timeout.total_seconds() or None)
            except Exception as e:
                self._end(e)
            else:
                self._end(None)
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """Whether it is there, or has left; moves it a little."""
        if not self._ended.is_set():
            try:
                if self._message.test():
                    self._end(None)
            except Exception as e:
                self._end(e)
        return self._ended.is_set()

    def _end(self, error: Exception | None) -> None:
        with self._once:
            if self._ended.is_set():
                return
            if error is None:
                self._source = self._message.source
                self._arrived()
            self.finish(error)
