"""The torch.distributed backend `checked_gloo`: torch's gloo, with calls compared between ranks and reported.

Every call is passed on to a ProcessGroupGloo. Before that, it is put into the status of this rank, and compared with
the calls of the other ranks unless it repeats earlier ones (call_comparison.py): gloo itself ends the process at
different shapes, and adds numbers of different types or of different tensors without an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import DrumlineError
from ...torchkit.process_groups import AllgatherOptions, has_backend
from ..call_check import LIBRARY_PACKAGES, CallSignature, call_site, signature
from ..environment import CHECKED_GLOO
from ..rank_status import rank_status
from ..tensor_identity import current_name, named_call
from .buffers import RefusedCall, for_torch, operator_name
from .call_comparison import CallComparison, start_answering, stop_answering
from .torch_interface import MessageText, PythonProcessGroup

_NO_TIMEOUT = timedelta(0)


def register() -> None:
    """Register the backend with torch."""
    if not has_backend(CHECKED_GLOO):
        dist.Backend.register_backend(CHECKED_GLOO, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> GlooGroup:
    """Create a process group; called by torch."""
    return GlooGroup(options.store, options.group_rank, options.group_size, options.timeout)


class GlooGroup(PythonProcessGroup):
    """A gloo group whose calls are compared and reported."""

    stands_for = "gloo"
    """The backend by which the engine decides what is possible."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(CHECKED_GLOO, rank, size)
        self._store = store
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
        calls = dist.PrefixStore("calls", store)
        self._calls = CallComparison(calls, rank, size, timeout.total_seconds(), self._gather_bytes)
        self._open: dict[int, Any] = {}
        """Asynchronous calls in progress, by number: the work, or a weak reference to it."""
        self._sweeping = threading.Lock()
        start_answering(self._look)

    def get_group_store(self) -> dist.Store:
        """The store of the group."""
        return self._store

    def _look(self) -> None:
        """Called by a thread a few times a second."""
        if self._open:
            self._sweep()
        self._calls.answer()

    # -- calls --------------------------------------------------------------------------------------------------------

    def _run(self, call: CallSignature, start: Callable[[], Any], opts: Any) -> Any:
        """Compare and report a call, start it, and wait for it unless it is asynchronous."""
        site = call_site(LIBRARY_PACKAGES)
        call = named_call(call, current_name())
        if self._open:
            self._sweep()
        members, status = self.members, rank_status()
        number = self._calls.number + 1
        status.collective_started(call.text, site.text, group=members.hash, number=number, peers=members.text)
        try:
            self._calls.enter(call, site)
            work = start()
            if getattr(opts, "asyncOp", True):
                # The work of an all-reduce is held here, because DDP's is not held in Python. Others would keep
                # temporary results alive.
                self._open[number] = work if call.text.startswith("all_reduce") else weakref.ref(work)
                return work
            work.wait()
        except DrumlineError as e:
            status.collective_ended()
            if self._calls.alone:
                self._gloo = None  # closes the connections, so that ranks which wait for this one get an error
            raise for_torch(e) from None
        except RuntimeError as e:
            status.collective_ended()
            raise self._reason(e, number) from None
        except BaseException:
            status.collective_ended()
            raise
        status.collective_ended()
        self._calls.ended(number)
        return work

    def _sweep(self) -> None:
        """Note which asynchronous calls have ended: at the next call, and a few times a second by a thread.

        A callback of each call would tell at once, but costs more than all the rest here.
        """
        with self._sweeping:
            for number, held in list(self._open.items()):
                work = held() if isinstance(held, weakref.ref) else held
                if work is None or work.is_completed():
                    del self._open[number]
                    rank_status().collective_ended()
                    self._calls.ended(number)

    def _reason(self, error: RuntimeError, number: int) -> BaseException:
        """The error of a call that failed: that of the rank which refused it, if there is one."""
        refusal = self._calls.refusal()
        self._calls.ended(number)
        return error if refusal is None else for_torch(refusal)

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        block = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        table = torch.empty(self._size * len(mine), dtype=torch.uint8)
        opts = AllgatherOptions()
        self._gloo.allgather([list(table.chunk(self._size))], [block], opts).wait()
        return [bytes(row.tolist()) for row in table.chunk(self._size)]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce on every rank."""
        opts = opts or dist.AllreduceOptions()
        call = _signature("all_reduce", tensors, _operator(opts))
        return self._run(call, lambda: self._gloo.allreduce(tensors, opts), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Run several at once."""
        opts = opts or dist.AllreduceCoalescedOptions()
        call = _signature("all_reduce_coalesced", tensors, _operator(opts))
        return self._run(call, lambda: self._gloo.allreduce_coalesced(tensors, opts), opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce on the root alone."""
        opts = opts or dist.ReduceOptions()
        call = _signature("reduce", tensors, _operator(opts), opts.rootRank)
        return self._run(call, lambda: self._gloo.reduce(tensors, opts), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Copy the root's tensors to all ranks."""
        opts = opts or dist.BroadcastOptions()
        call = _signature("broadcast", tensors, "", opts.rootRank)
        return self._run(call, lambda: self._gloo.broadcast(tensors, opts), opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Every rank's tensor on every rank, in a list."""
        opts = opts or AllgatherOptions()
        return self._run(_signature("all_gather", inputs), lambda: self._gloo.allgather(outputs, inputs, opts), opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather several tensors."""
        opts = opts or AllgatherOptions()
        call = _signature("all_gather_coalesced", inputs)
        return self._run(call, lambda: self._gloo.allgather_coalesced(outputs, inputs, opts), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Every rank's tensor on every rank, in one tensor."""
        opts = opts or AllgatherOptions()
        call = _signature("all_gather", [input])
        return self._run(call, lambda: self._gloo._allgather_base(output, input, opts), opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Run several, one after the other."""
        works = [self.all_gather_single(out, mine, opts) for out, mine in zip(outputs, inputs, strict=True)]
        return _Works(works)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Every rank's tensor on the root, in a list."""
        opts = opts or dist.GatherOptions()
        call = _signature("gather", inputs, "", opts.rootRank)
        return self._run(call, lambda: self._gloo.gather(outputs, inputs, opts), opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """The root's list, one tensor to each rank."""
        opts = opts or dist.ScatterOptions()
        call = _signature("scatter", outputs, "", opts.rootRank)
        return self._run(call, lambda: self._gloo.scatter(outputs, inputs, opts), opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Rank r gets the reduction of all ranks' r-th tensors."""
        opts = opts or dist.ReduceScatterOptions()
        call = _signature("reduce_scatter", [part for parts in inputs for part in parts], _operator(opts))
        return self._run(call, lambda: self._gloo.reduce_scatter(outputs, inputs, opts), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Rank r gets the r-th part of the reduction."""
        opts = opts or dist.ReduceScatterOptions()
        call = _signature("reduce_scatter", [input], _operator(opts))
        return self._run(call, lambda: self._gloo._reduce_scatter_base(output, input, opts), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Run several, one after the other."""
        works = [self.reduce_scatter_single(out, whole, opts) for out, whole in zip(outputs, inputs, strict=True)]
        return _Works(works)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """`inputs[s]` to rank s, `outputs[s]` from it."""
        opts = opts or dist.AllToAllOptions()
        call = signature("all_to_all", outputs[0].dtype)
        return self._run(call, lambda: self._gloo.alltoall(outputs, inputs, opts), opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, takes: list[int], gives: list[int], opts: Any = None
    ) -> Any:
        """All-to-all of parts of one tensor, split along the first dimension."""
        opts = opts or dist.AllToAllOptions()
        # with lists of sizes, each pair of ranks has its own
        call = signature("all_to_all", output.dtype, None if takes or gives else (input.numel(),))
        return self._run(call, lambda: self._gloo.alltoall_base(output, input, takes, gives, opts), opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Return when all ranks have called it."""
        opts = opts or dist.BarrierOptions()
        return self._run(signature("barrier"), lambda: self._gloo.barrier(opts), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error on rank 0 names the ranks that did not call it."""
        given = () if timeout is None else (timeout,)
        self._gloo.monitored_barrier(*given, wait_all_ranks=wait_all_ranks)

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        """Start a send."""
        return _Message(self._gloo.send(tensors, dst, tag), tensors, MessageText("send", self, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        """Start a receive."""
        if src < 0:
            return self.recv_anysource(tensors, tag)
        return _Message(self._gloo.recv(tensors, src, tag), tensors, MessageText("recv", self, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Start a receive from the rank that sends first."""
        return _Message(self._gloo.recv_anysource(tensors, tag), tensors, MessageText("recvAnySource", self, -1, tag))

    def shutdown(self) -> None:
        """Leave the group."""
        stop_answering(self._look)
        self._gloo = None

    abort = shutdown


def _signature(name: str, tensors: Sequence[Tensor], op: str = "", root: int | None = None) -> CallSignature:
    return signature(name, tensors[0].dtype if tensors else None, tuple(t.numel() for t in tensors), op, root)


def _operator(opts: Any) -> str:
    try:
        return operator_name(opts)
    except RefusedCall:  # gloo decides about it
        return str(opts.reduceOp)


class _Works(dist.Work):
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


class _Message(dist.Work):
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
