"""Calls and messages in progress of the backend `checked_gloo` (gloo_group.py)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..rank_status import rank_status
from .buffers import GroupGaveUp
from .torch_interface import MessageText

_NO_TIMEOUT = timedelta(0)


class LeftGroup:
    """In place of gloo's group when this rank has left it, which closes its connections."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise GroupGaveUp(f"{name} in a process group that was destroyed, or that this rank has left")


class WeakWork:
    """A work that is held elsewhere, or has ended."""

    __slots__ = ("_reference",)

    def __init__(self, work: Any) -> None:
        self._reference = weakref.ref(work)

    def __call__(self) -> bool:
        """Whether it has ended."""
        work = self._reference()
        return work is None or work.is_completed()


class GlooWork(dist.Work):
    """An asynchronous call of gloo. If another rank has refused it, a wait raises that rank's error, not gloo's."""

    def __init__(self, work: Any, reason: Callable[[RuntimeError, int], BaseException], number: int) -> None:
        super().__init__()
        self._work, self._reason, self._number = work, reason, number

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until it has ended."""
        try:
            return bool(self._work.wait(timeout))
        except RuntimeError as e:
            raise self._reason(e, self._number) from None

    def synchronize(self) -> None:
        """Wait: a CPU has no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Its error."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """The tensors that it fills."""
        return list(self._work.result())

    def get_future(self) -> Any:
        """Gloo's future, which DDP waits for in C++: its error is gloo's own."""
        return self._work.get_future()


class EndOfBucket:
    """Whether a bucket of DDP has ended: its future, for which DDP waits, says so a moment before the work does."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def __call__(self) -> bool:
        return bool(self._work.get_future().done())


class SeveralWorks(dist.Work):
    """Several calls as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for all of them."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all of them have ended."""
        return all(work.is_completed() for work in self._works)


class GlooMessage(dist.Work):
    """A message in progress; a wait for it is in the status of this rank."""

    def __init__(self, work: Any, tensors: Sequence[Tensor], about: MessageText) -> None:
        super().__init__()
        self._work, self._tensors, self._about = work, tensors, about

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until it is sent or received."""
        self._about.wait_begins(self._tensors[0])
        try:
            return bool(self._work.wait(timeout))
        finally:
            rank_status().collective_ended()

    def is_completed(self) -> bool:
        """Whether it is sent or received."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Its error."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """The tensors that it fills."""
        return list(self._tensors)

    def source_rank(self) -> int:
        """The sender of a message."""
        return int(self._work._source_rank())

    _source_rank = source_rank
