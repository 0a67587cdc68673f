"""The life cycle of a torch process group in Python: runs its calls, delivers its messages, and shuts it down.

A call that torch waits for at once runs in the caller's thread; others run one after the other in the group's thread,
so that computation continues. CUDA tensors go to an inner NCCL group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import DrumlineError
from ...torchkit.profiler import profiler_enabled
from ..call_check import LIBRARY_PACKAGES, CallSite, call_site, signature
from ..rank_status import rank_status
from ..tensor_identity import TensorOrder, current_name, named_call
from .backend import BackendMessage, CollectiveBackend
from .buffers import GroupGaveUp, GroupInputError, RefusedCall, as_contiguous, check_dense, copy_back, for_torch
from .torch_interface import GroupWork, MessageText, MessageWork, ProfilerSpan, PythonProcessGroup

_DELIVERY_INTERVAL = 0.001
"""Seconds between two rounds of the delivery thread."""
_STORE_INTERVAL = 0.002
"""Seconds between two reads of the store."""
_DONE = GroupWork((), done=True)

Task = Callable[[], object]


class ProcessGroupRunner(PythonProcessGroup):
    """A process group over a backend: messages, threads and shutdown. The collectives are in the subclass."""

    def __init__(
        self, name: str, backend: CollectiveBackend, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(name, rank, size)
        self._backend, self._store, self._timeout = backend, store, timeout
        self._tasks: SimpleQueue[tuple[Task, GroupWork, CallSite] | None] = SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._messages_changed = threading.Condition()
        self._messages: list[MessageWork] = []
        self._delivery_thread: threading.Thread | None = None
        self._nccl: Any = None
        self._order = TensorOrder()
        self._calls = 0
        """Number of collectives so far."""
        self._monitored = 0
        """Number of monitored barriers so far."""
        self.watch: Callable[[str, float], Any] | None = None
        """Called when a collective starts, with its name and bytes; the result's `end()` is called when it ends."""

    def get_group_store(self) -> dist.Store:
        """The store of the group."""
        return self._store

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Start a send."""
        if tensors[0].is_cuda:
            return self._nccl_call("send", tensors, dst, tag)
        about = MessageText("send", self, dst, tag)
        return self._start_message(about, tensors[0], lambda flat: self._backend.send(flat, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Start a receive."""
        if tensors[0].is_cuda:
            return self._nccl_call("recv", tensors, src, tag)
        about = MessageText("recv" if src >= 0 else "recvAnySource", self, src, tag)
        return self._start_message(about, tensors[0], lambda flat: self._backend.receive(flat, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Start a receive from the rank that sends first."""
        return self.recv(tensors, -1, tag)

    def _start_message(
        self, about: MessageText, tensor: Tensor, start: Callable[[Tensor], BackendMessage]
    ) -> dist.Work:
        """Start a message: a send of the tensor's values, or a receive into it."""
        fill = about.name == "send"
        try:
            check_dense(tensor)
            flat = as_contiguous(tensor, fill=fill)
            span = ProfilerSpan(f"{self._name}:{about.name}") if profiler_enabled() else None
            message = start(flat)
        except DrumlineError as e:
            raise for_torch(e) from None
        if fill:
            return self._deliver_later(MessageWork(flat, message, lambda: None, span, about))
        return self._deliver_later(MessageWork(tensor, message, lambda: copy_back(flat, tensor), span, about))

    def _deliver_later(self, work: MessageWork) -> MessageWork:
        """Pass a message that is not complete at once to the delivery thread."""
        if not work.is_completed():
            with self._messages_changed:
                self._messages.append(work)
                if self._delivery_thread is None:
                    name = f"{self._name} delivery"
                    self._delivery_thread = threading.Thread(target=self._deliver, name=name, daemon=True)
                    self._delivery_thread.start()
                self._messages_changed.notify()
        return work

    def _deliver(self) -> None:
        """Thread: make progress on messages no thread waits on; sleep while there are none."""
        while not self._closed:
            with self._messages_changed:
                while not self._messages and not self._closed:
                    self._messages_changed.wait()
                messages = list(self._messages)
            ended = {id(work) for work in messages if work.is_completed()}
            with self._messages_changed:
                self._messages = [work for work in self._messages if id(work) not in ended]
            time.sleep(_DELIVERY_INTERVAL)

    # -- collectives --------------------------------------------------------------------------------------------------

    def _run(self, name: str, task: Task, outputs: Sequence[Tensor], opts: Any, *, raw: bool = False) -> dist.Work:
        """Run here if torch waits for it anyway and nothing is queued, else in the group's thread.

        A raw task touches memory only by address, so autograd need not be disabled.
        """
        if self._closed:
            raise GroupGaveUp(f"the process group {self._name} was destroyed")
        site = call_site(LIBRARY_PACKAGES)
        if name == "all_reduce" and len(outputs) == 1:
            site = self._order.at(site, outputs[0])
        if named := current_name():
            site = replace(site, name=named)
        self._report_call(name, outputs, site)
        span = self._span(name, outputs)
        if not getattr(opts, "asyncOp", True) and self._lock.acquire(False):
            try:
                if self._pending == 0:
                    try:
                        self._do(task, site, raw=raw)
                    finally:
                        rank_status().collective_ended()
                        if span is not None:
                            span.end()
                    return _DONE  # torch waits for it and drops it
            finally:
                self._lock.release()
        work = GroupWork(outputs, span)
        with self._lock:
            self._pending += 1
            self._tasks.put((task, work, site))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"drumline {self._name}", daemon=True)
                self._thread.start()
        return work

    def _report_call(self, name: str, outputs: Sequence[Tensor], site: CallSite) -> None:
        """Put a call into the status of this rank."""
        self._calls += 1
        members = self.members
        call = signature(name, outputs[0].dtype, (outputs[0].numel(),)) if outputs else signature(name)
        text = named_call(call, site.name).text
        rank_status().collective_started(text, site.text, group=members.hash, number=self._calls, peers=members.text)

    def _span(self, name: str, outputs: Sequence[Tensor]) -> Any:
        """An object to `end()` after a call: for the profiler, or from `watch`."""
        if profiler_enabled():
            return ProfilerSpan(f"{self._name}:{name}")
        if self.watch is None:
            return None
        # the output of a reduce-scatter is one part of the data
        parts = self._size if name.startswith("reduce_scatter") else 1
        return self.watch(name, float(parts * sum(t.nbytes for t in outputs)))

    def _do(self, task: Task, site: CallSite, *, raw: bool = False) -> None:
        self._backend.at_site(site)
        try:
            if raw:
                task()
            else:
                with torch.no_grad():
                    task()
        except RefusedCall as e:
            self._backend.refuse(e.what)
            raise
        except DrumlineError as e:
            raise for_torch(e) from None

    def _serve(self) -> None:
        """Thread: run one call after the other."""
        while (item := self._tasks.get()) is not None:
            task, work, site = item
            error: BaseException | None = None
            try:
                self._do(task, site)
            except BaseException as e:
                error = e
            with self._lock:
                self._pending -= 1
            rank_status().collective_ended()
            work.finish(error)
            del item, task, work

    def _nccl_call(self, name: str, *arguments: Any) -> dist.Work:
        """The same call on the inner NCCL group."""
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

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error on rank 0 names the ranks that did not call it."""
        self._monitored += 1
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        key = f"monitored/{self._monitored}"
        _monitored_barrier(self._store, key, self._number, self._size, seconds, wait_all_ranks=wait_all_ranks)

    def shutdown(self) -> None:
        """Finish the queued calls and leave the group."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(max(0.0, self._timeout.total_seconds()))
        with self._messages_changed:
            self._messages_changed.notify()
        if self._delivery_thread is not None:
            self._delivery_thread.join()
        if self._nccl is not None:
            self._nccl.shutdown()
        self._backend.close()

    abort = shutdown


def _monitored_barrier(
    store: dist.Store, key: str, rank: int, size: int, seconds: float, *, wait_all_ranks: bool = False
) -> None:
    """Meet through the store, which works when nothing else does; `key` is unique to this barrier.

    Rank 0 waits for all others and publishes the result. It stops at the first missing rank, or with `wait_all_ranks`
    finds all of them.
    """
    end = time.monotonic() + seconds
    if rank == 0:
        late = seconds <= 0
        missing = [] if late else list(islice(_missing(store, key, size, end), None if wait_all_ranks else 1))
        store.set(f"{key}/end", "rank 0 had no time" if late else ", ".join(f"rank {s}" for s in missing))
        # the words of torch's own error, for programs that search for them
        if late:
            raise GroupGaveUp(f"Rank 0 timed out in monitoredBarrier after {seconds:g} s")
        if missing:
            who = f"Ranks {', '.join(map(str, missing))}" if len(missing) > 1 else f"Rank {missing[0]}"
            raise GroupGaveUp(f"{who} failed to pass monitoredBarrier in {seconds:g} s", rule="all ranks call it")
        return
    store.set(f"{key}/{rank}", "")
    if not _appears(store, f"{key}/end", end):
        raise GroupGaveUp(f"rank {rank} reached the monitored barrier, rank 0 did not within {seconds:g} s")
    if missed := store.get(f"{key}/end").decode():
        raise GroupGaveUp(f"rank {rank} reached the monitored barrier, others did not: {missed}")


def _missing(store: dist.Store, key: str, size: int, end: float) -> Iterator[int]:
    return (s for s in range(1, size) if not _appears(store, f"{key}/{s}", end))


def _appears(store: dist.Store, key: str, end: float) -> bool:
    """Whether a key is set before the end."""
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(_STORE_INTERVAL)
    return True
