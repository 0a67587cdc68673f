"""The life of a torch process group in Python: who runs its calls, moves its messages, and ends it.

A call that torch will wait for at once runs in the caller's thread; others run one after the other in a thread of the
group, so that computing goes on meanwhile. CUDA tensors go to an inner NCCL group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import DrumlineError
from ..calls import OURS, Site, call_site
from .buffers import Refused, back, dense, plain
from .engine import Engine, Message
from .errors import GroupGaveUp, GroupInputError, for_torch
from .named import NamedGroup
from .spans import Span, profiling
from .works import GroupWork, MessageWork

_ROUND = 0.001
"""Seconds between two rounds of the postman."""

_DONE = GroupWork((), done=True)

Job = Callable[[], object]


class GroupRunner(NamedGroup):
    """The life of a process group over an engine, and its messages."""

    def __init__(self, name: str, engine: Engine, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(name, rank, size)
        self._engine, self._store, self._timeout = engine, store, timeout
        self._jobs: SimpleQueue[tuple[Job, GroupWork, Site] | None] = SimpleQueue()
        self._pending = 0
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._mail = threading.Condition()
        self._letters: list[MessageWork] = []
        self._postman: threading.Thread | None = None
        self._nccl: Any = None
        self._monitored = 0
        """How many monitored barriers there were."""
        self.watch: Callable[[str, float], Any] | None = None
        """Told of every collective when it begins, by its name and bytes; gives something to `end()`."""

    def get_group_store(self) -> dist.Store:
        """The store through which the ranks met."""
        return self._store

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Start a message."""
        if tensors[0].is_cuda:
            return self._inner("send", tensors, dst, tag)
        return self._letter("send", tensors[0], lambda flat: self._engine.send(flat, dst, tag), fill=True)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Start to receive."""
        if tensors[0].is_cuda:
            return self._inner("recv", tensors, src, tag)
        name = "recv" if src >= 0 else "recvAnySource"
        return self._letter(name, tensors[0], lambda flat: self._engine.receive(flat, src, tag), fill=False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Start to receive from whoever sends first."""
        return self.recv(tensors, -1, tag)

    def _letter(self, name: str, tensor: Tensor, start: Callable[[Tensor], Message], *, fill: bool) -> dist.Work:
        """Start a message: with `fill` the tensor's values leave, else new ones come."""
        try:
            dense(tensor)
            flat = plain(tensor, fill=fill)
            span = Span(f"{self._name}:{name}") if profiling() else None
            message = start(flat)
        except DrumlineError as e:
            raise for_torch(e) from None
        if fill:
            return self._watched(MessageWork(flat, message, lambda: None, span))
        return self._watched(MessageWork(tensor, message, lambda: back(flat, tensor), span))

    def _watched(self, work: MessageWork) -> MessageWork:
        """Have the postman look after a message that is not done at once."""
        if not work.is_completed():
            with self._mail:
                self._letters.append(work)
                if self._postman is None:
                    self._postman = threading.Thread(target=self._deliver, name=f"{self._name} postman", daemon=True)
                    self._postman.start()
                self._mail.notify()
        return work

    def _deliver(self) -> None:
        """The postman: moves messages that nobody waits for, and sleeps while there are none."""
        while not self._closed:
            with self._mail:
                while not self._letters and not self._closed:
                    self._mail.wait()
                letters = list(self._letters)
            ended = {id(work) for work in letters if work.is_completed()}
            with self._mail:
                self._letters = [work for work in self._letters if id(work) not in ended]
            time.sleep(_ROUND)

    # -- running -------------------------------------------------------------------------------------------------

    def _run(self, name: str, job: Job, outputs: Sequence[Tensor], opts: Any, *, raw: bool = False) -> dist.Work:
        """Here and now if torch will wait for it anyway and nothing is before it, else in the group's thread.

        A raw job touches memory only by its address, so autograd need not be told to look away.
        """
        if self._closed:
            raise GroupGaveUp(f"the process group {self._name} was destroyed")
        site = call_site(OURS)
        span = self._span(name, outputs)
        if not getattr(opts, "asyncOp", True) and self._turn.acquire(False):
            try:
                if self._pending == 0:
                    try:
                        self._do(job, site, raw=raw)
                    finally:
                        if span is not None:
                            span.end()
                    return _DONE  # torch waits for it, and forgets it
            finally:
                self._turn.release()
        work = GroupWork(outputs, span)
        with self._turn:
            self._pending += 1
            self._jobs.put((job, work, site))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"drumline {self._name}", daemon=True)
                self._thread.start()
        return work

    def _span(self, name: str, outputs: Sequence[Tensor]) -> Any:
        """What is told of the end of a call: the profiler, or who watches."""
        if profiling():
            return Span(f"{self._name}:{name}")
        if self.watch is None:
            return None
        # of a reduce-scatter the output is one part of what travels
        parts = self._size if name.startswith("reduce_scatter") else 1
        return self.watch(name, float(parts * sum(t.nbytes for t in outputs)))

    def _do(self, job: Job, site: Site, *, raw: bool = False) -> None:
        self._engine.at_site(site)
        try:
            if raw:
                job()
            else:
                with torch.no_grad():
                    job()
        except Refused as e:
            self._engine.refuse(e.what)
            raise
        except DrumlineError as e:
            raise for_torch(e) from None

    def _serve(self) -> None:
        """The group's thread: one call after the other."""
        while (item := self._jobs.get()) is not None:
            job, work, site = item
            error: BaseException | None = None
            try:
                self._do(job, site)
            except BaseException as e:
                error = e
            with self._turn:
                self._pending -= 1
            work.finish(error)
            del item, job, work

    def _inner(self, name: str, *arguments: Any) -> dist.Work:
        """The same call on the NCCL group."""
        if self._nccl is None:
            if not dist.is_nccl_available():
                raise GroupInputError(
                    "a CUDA tensor, but torch has no NCCL", rule=f"{self._name} moves CPU tensors itself"
                )
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = dist.PrefixStore("nccl", self._store)
            self._nccl = dist.ProcessGroupNCCL(store, self._number, self._size, options)
        return getattr(self._nccl, name)(*arguments)  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        """Finish what is under way and leave the group."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            end = time.monotonic() + self._timeout.total_seconds()
            self._thread.join(max(0.0, end - time.monotonic()))
        with self._mail:
            self._mail.notify()
        if self._postman is not None:
            self._postman.join()
        if self._nccl is not None:
            self._nccl.shutdown()
        self._engine.close()

    abort = shutdown
