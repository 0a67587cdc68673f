"""The objects that torch expects of a process group in Python: the group's identity, its works, its profiler spans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from ...torchkit.profiler import end_with_future
from ..call_check import LIBRARY_PACKAGES, call_site, digest, signature
from ..rank_status import rank_list, rank_status
from .backend import BackendMessage
from .buffers import GroupGaveUp, for_torch

_NO_TIMEOUT = timedelta(0)
_COMPLETED = threading.Event()
_COMPLETED.set()
_FUTURES = threading.Lock()
"""Held briefly while a future is made or completed."""
_ProcessGroup: Any = dist.ProcessGroup
"""Untyped: torch's annotations describe overloads that only its own groups have."""


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """The ranks of a group, by their numbers in the world, as rank status writes them."""

    ranks: tuple[int, ...]
    text: str
    hash: int

    @staticmethod
    def of(ranks: Sequence[int]) -> GroupRanks:
        """The members of a group."""
        return GroupRanks(tuple(ranks), rank_list(ranks), digest(f"group {rank_list(ranks)}"))


class PythonProcessGroup(_ProcessGroup):  # type: ignore[misc]  # see above
    """The base of our process groups: rank, size and names. Subclasses implement the collectives."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name, self._number, self._size = name, rank, size
        self._group_name = self._group_desc = ""
        self._members: GroupRanks | None = None

    def rank(self) -> int:
        """This rank's number."""
        return self._number

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def name(self) -> str:
        """The backend's name."""
        return self._name

    def getBackendName(self) -> str:
        """The backend's name, for C++."""
        return self._name

    def _get_backend_name(self) -> str:
        return self._name

    @property
    def members(self) -> GroupRanks:
        """The ranks of the group, by their numbers in the world."""
        if self._members is None:
            try:
                ranks = tuple(dist.get_process_group_ranks(self))
            except (KeyError, ValueError):  # torch does not know the group, or not yet
                return GroupRanks.of(range(self._size))
            self._members = GroupRanks.of(ranks)
        return self._members

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """Torch's description of the group."""
        return self._group_desc

    def _set_group_name(self, name: str) -> None:
        self._group_name = name
        super()._set_group_name(name)

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text
        super()._set_group_desc(text)


class ProfilerSpan:
    """A collective in torch's profiler, from the call until it completes, on any thread. Made only while profiling."""

    def __init__(self, name: str) -> None:
        record = record_function(name)
        record.__enter__()
        self._done: torch.futures.Future[None] = torch.futures.Future()
        end_with_future(record, self._done)

    def end(self) -> None:
        """End the span."""
        self._done.set_result(None)


class GroupWork(dist.Work):
    """A call in progress or complete. Its results are in the tensors that it was given."""

    def __init__(self, outputs: Sequence[Tensor], span: ProfilerSpan | None = None, *, done: bool = False) -> None:
        super().__init__()
        self._outputs, self._span = outputs, span
        self._completed = _COMPLETED if done else threading.Event()
        self._error: BaseException | None = None
        self._signal: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._source = -1

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the work; called once."""
        if self._span is not None:
            self._span.end()
        with _FUTURES:
            self._error = None if error is None else for_torch(error)
            self._completed.set()
            signal = self._signal
        if signal is not None:
            signal.set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until it is complete; raise its error."""
        if not self._completed.is_set() and not self._completed.wait(timeout.total_seconds() or None):
            raise GroupGaveUp(f"a collective is not done after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait: a CPU has no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._completed.is_set()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Its error."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that it fills."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """The sender of a message."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with the call; made on request.

        Its error is raised in a callback, because DDP reads it in C++. `Future.set_exception` would only store the
        exception as a value, which C++ takes for a tensor: the process then ends by SIGSEGV.
        """
        with _FUTURES:
            if self._future is not None:
                return self._future
            signal: torch.futures.Future[None] = torch.futures.Future()
            self._future = signal.then(self._outcome)
            if not self._completed.is_set():
                self._signal = signal
                return self._future
        signal.set_result(None)
        return self._future

    def _outcome(self, _: torch.futures.Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return list(self._outputs)


@dataclass(frozen=True, slots=True)
class MessageText:
    """A message to or from another rank, for the status of this rank."""

    name: str
    """`send` or `recv`."""
    group: PythonProcessGroup
    peer: int
    """The other rank's number in the group; -1 is any."""
    tag: int

    def wait_begins(self, tensor: Tensor) -> None:
        """Report that this rank waits for the message."""
        members = self.group.members
        peers = members.ranks if self.peer < 0 else members.ranks[self.peer : self.peer + 1]
        what = signature("send" if self.name == "send" else "receive", tensor.dtype, (tensor.numel(),)).text
        other = "any rank" if self.peer < 0 else f"rank {peers[0]}"
        text = f"{what} {'to' if self.name == 'send' else 'from'} {other} tag={self.tag}"
        rank_status().collective_started(text, call_site(LIBRARY_PACKAGES).text, peers=rank_list(peers))


class MessageWork(GroupWork):
    """A message in progress. A thread that waits for it makes its progress; otherwise the group's delivery thread."""

    def __init__(
        self,
        tensor: Tensor,
        message: BackendMessage,
        arrived: Callable[[], None],
        span: ProfilerSpan | None,
        about: MessageText,
    ) -> None:
        super().__init__([tensor], span)
        self._message, self._arrived, self._once = message, arrived, threading.Lock()
        self._about = about

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until it is sent or received."""
        if not self._completed.is_set():
            self._about.wait_begins(self._outputs[0])
            try:
                self._message.wait(timeout.total_seconds() or None)
            except Exception as e:
                self._end(e)
            else:
                self._end(None)
            rank_status().collective_ended()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """Whether it is sent or received; makes progress."""
        if not self._completed.is_set():
            try:
                if self._message.test():
                    self._end(None)
            except Exception as e:
                self._end(e)
        return self._completed.is_set()

    def _end(self, error: Exception | None) -> None:
        with self._once:
            if self._completed.is_set():
                return
            if error is None:
                self._source = self._message.source
                self._arrived()
            self.finish(error)
