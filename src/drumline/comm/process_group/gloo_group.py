"""The torch.distributed backend `checked_gloo`: torch's gloo, with calls compared between ranks and reported.

Every call is passed on to a ProcessGroupGloo. Before that, it is put into the status of this rank, and compared with
the calls of the other ranks unless it repeats earlier ones (call_comparison.py): gloo itself ends the process at
different shapes, and adds numbers of different types or of different tensors without an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import DrumlineError
from ...torchkit.autograd import BACKWARD
from ...torchkit.process_groups import AllgatherOptions, has_backend
from ..call_check import LIBRARY_PACKAGES, CallPlace, CallSignature, CallSite, call_site, signature
from ..environment import CHECKED_GLOO
from ..rank_status import rank_status
from ..signed_store import AlteredStore
from ..tensor_identity import current_name, named_call
from .buffers import RefusedCall, for_torch, operator_name
from .call_comparison import CallComparison, start_answering, stop_answering
from .gloo_works import EndOfBucket, GlooMessage, GlooWork, LeftGroup, SeveralWorks, WeakWork
from .torch_interface import MessageText, PythonProcessGroup

_SUM = dist.ReduceOp.SUM
_HELD = ("all_reduce", "all_reduce_coalesced")
"""Calls whose work is held until they have ended, because DDP's is not held in Python."""
CallParts = tuple[Any, ...]
"""The arguments of `signature` for a call."""


@dataclass(frozen=True, slots=True, eq=False)
class _RecognizedCall:
    """How a call that repeats an earlier one is recognized."""

    parts: CallParts
    name: str
    place: CallPlace
    call: CallSignature

    from_backward: bool
    """Whether C++ makes it during a backward: DDP, which waits for its future, and so needs no work in Python."""


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
        self._open = self._calls.open_calls
        self._reported = 0
        """The number of the last call that is in the status of this rank."""
        self._reporting = threading.Lock()
        self.watch_buckets: Any = None
        """Its `add(name, bytes, start)` is called for each asynchronous all-reduce, those of DDP, with the start by
        `time.perf_counter_ns`: at the moment of its end if it is `exact`, else when that is noticed."""
        start_answering(self._look)

    def get_group_store(self) -> dist.Store:
        """The store of the group."""
        return self._store

    def _look(self) -> None:
        """Called by a thread a few times a second."""
        self._sweep()
        self._calls.answer()

    def _sweep(self, *, everything: bool = False) -> None:
        """Report the asynchronous calls that have ended, and the buckets of DDP since the last report."""
        ended, last = self._open.sweep(everything=everything), self._open.last()
        if last is not None:
            self._report(*last, ended)

    def _report(self, number: int, call: CallSignature, site: CallSite, ended: int) -> None:
        """Put a call into the status of this rank, with the buckets of DDP before it, unless it is there already."""
        status, members = rank_status(), self._members or self.members
        with self._reporting:
            started, self._reported = number - self._reported, max(number, self._reported)
            if started > 0:
                status.collective_started(
                    call.text,
                    site.text,
                    group=members.hash,
                    number=number,
                    peers=members.text,
                    started=started,
                    ended=ended,
                )
            elif ended:
                status.collective_ended(ended)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _run(
        self,
        parts: CallParts,
        method: str,
        arguments: tuple[Any, ...],
        opts: Any,
        size: float | None = None,
    ) -> Any:
        """Compare and report a call, start it by a method of gloo, and wait for it unless it is asynchronous.

        `size` are the bytes of a bucket that `watch_buckets` is told about.

        Called in every step, between kernels that fill the caches: each line counts.
        """
        calls, status, start = self._calls, rank_status(), time.perf_counter_ns()
        expected, ended = calls.sequence.expected, 0
        known: _RecognizedCall | None = None if expected is None else expected.recognized_by
        if known is not None and known.parts == parts and known.place.is_here() and known.name == current_name():
            call, site = known.call, known.place.site
        else:
            known = None
            call, site = named_call(signature(*parts), current_name()), call_site(LIBRARY_PACKAGES)
        if self._open.asynchronous and not (known is not None and known.from_backward):
            ended = self._open.sweep()  # DDP's buckets end at the end of the backward: its next call takes out all
        number, asynchronous = calls.number + 1, opts is None or getattr(opts, "asyncOp", True)
        self._report(number, call, site, ended)
        try:
            if known is None:
                if calls.enter(call, site) and (place := CallPlace.here(LIBRARY_PACKAGES)):
                    expected.recognized_by = _RecognizedCall(  # type: ignore[union-attr]  # `enter` has met it
                        parts, current_name(), place, call, from_backward=place.caller is BACKWARD
                    )
            else:
                calls.follow(expected)  # type: ignore[arg-type]  # it has recognized the call
                if not asynchronous:
                    self._open.begin(number, call, site)
            work = getattr(self._gloo, method)(*arguments)
            if asynchronous:
                end = None if size is None else self._end_of(work, size, start)
                has_ended = (
                    WeakWork(work) if parts[0] not in _HELD else EndOfBucket(work) if size else work.is_completed
                )
                if known is None:
                    self._open.go_on(number, has_ended, end)
                    return GlooWork(work, self._reason, number)
                self._open.asynchronous.append((number, call, site, start, has_ended, end))
                return work if known.from_backward else GlooWork(work, self._reason, number)
            work.wait()
        except DrumlineError as e:
            status.collective_ended()
            if calls.alone:
                self._gloo = LeftGroup()  # closes the connections, so that ranks which wait for this one get an error
            raise for_torch(e) from None
        except RuntimeError as e:
            status.collective_ended()
            raise self._reason(e, number) from None
        except BaseException:
            status.collective_ended()
            raise
        status.collective_ended()
        self._open.end(number)
        return work

    def _reason(self, error: RuntimeError, number: int) -> BaseException:
        """The error of a call that failed: that of the rank which refused it, if there is one."""
        try:
            refusal: DrumlineError | None = self._calls.refusal()
        except AlteredStore as e:
            refusal = e
        self._open.end(number)
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
        call = _parts("all_reduce", tensors, "sum" if opts.reduceOp == _SUM else _operator(opts))
        expected = self._calls.sequence.expected
        known: _RecognizedCall | None = None if expected is None else expected.recognized_by
        if (
            known is not None
            and known.from_backward
            and known.parts == call
            and known.place.is_here(nearer=1)
            and known.name == current_name()
            and rank_status().listener is None  # it would hear of the call too late
        ):
            return self._start_bucket(expected, known, tensors, opts)
        size = float(sum(t.nbytes for t in tensors)) if self.watch_buckets is not None and opts.asyncOp else None
        return self._run(call, "allreduce", (tensors, opts), opts, size)

    def _start_bucket(self, expected: Any, known: _RecognizedCall, tensors: list[Tensor], opts: Any) -> Any:
        """Start a recognized bucket of DDP. It is reported with the next other call, or by `_look`."""
        calls, start = self._calls, time.perf_counter_ns()
        calls.follow(expected)
        try:
            work = self._gloo.allreduce(tensors, opts)
        except RuntimeError as e:
            raise self._reason(e, calls.number) from None
        end = None if self.watch_buckets is None else self._end_of(work, float(tensors[0].nbytes), start)
        self._open.asynchronous.append((calls.number, known.call, known.place.site, start, EndOfBucket(work), end))
        return work

    def _end_of(self, work: Any, size: float, start: int) -> Callable[[], None] | None:
        """The function to call when the end of a bucket is noticed, which records it; None if gloo itself calls it."""
        end = partial(self.watch_buckets.add, "all_reduce", size, start)
        if not self.watch_buckets.exact:
            return end
        work.get_future().add_done_callback(end)
        return None

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Run several at once."""
        opts = opts or dist.AllreduceCoalescedOptions()
        call = _parts("all_reduce_coalesced", tensors, _operator(opts))
        return self._run(call, "allreduce_coalesced", (tensors, opts), opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce on the root alone."""
        opts = opts or dist.ReduceOptions()
        call = _parts("reduce", tensors, _operator(opts), opts.rootRank)
        return self._run(call, "reduce", (tensors, opts), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Copy the root's tensors to all ranks."""
        opts = opts or dist.BroadcastOptions()
        call = _parts("broadcast", tensors, "", opts.rootRank)
        return self._run(call, "broadcast", (tensors, opts), opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Every rank's tensor on every rank, in a list."""
        opts = opts or AllgatherOptions()
        return self._run(_parts("all_gather", inputs), "allgather", (outputs, inputs, opts), opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather several tensors."""
        opts = opts or AllgatherOptions()
        call = _parts("all_gather_coalesced", inputs)
        return self._run(call, "allgather_coalesced", (outputs, inputs, opts), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Every rank's tensor on every rank, in one tensor."""
        opts = opts or AllgatherOptions()
        call = _parts("all_gather", [input])
        return self._run(call, "_allgather_base", (output, input, opts), opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Run several, one after the other."""
        works = [self.all_gather_single(out, mine, opts) for out, mine in zip(outputs, inputs, strict=True)]
        return SeveralWorks(works)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Every rank's tensor on the root, in a list."""
        opts = opts or dist.GatherOptions()
        call = _parts("gather", inputs, "", opts.rootRank)
        return self._run(call, "gather", (outputs, inputs, opts), opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """The root's list, one tensor to each rank."""
        opts = opts or dist.ScatterOptions()
        call = _parts("scatter", outputs, "", opts.rootRank)
        return self._run(call, "scatter", (outputs, inputs, opts), opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Rank r gets the reduction of all ranks' r-th tensors."""
        opts = opts or dist.ReduceScatterOptions()
        call = _parts("reduce_scatter", [part for parts in inputs for part in parts], _operator(opts))
        return self._run(call, "reduce_scatter", (outputs, inputs, opts), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Rank r gets the r-th part of the reduction."""
        opts = opts or dist.ReduceScatterOptions()
        call = _parts("reduce_scatter", [input], _operator(opts))
        return self._run(call, "_reduce_scatter_base", (output, input, opts), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Run several, one after the other."""
        works = [self.reduce_scatter_single(out, whole, opts) for out, whole in zip(outputs, inputs, strict=True)]
        return SeveralWorks(works)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """`inputs[s]` to rank s, `outputs[s]` from it."""
        opts = opts or dist.AllToAllOptions()
        call = ("all_to_all", outputs[0].dtype)
        return self._run(call, "alltoall", (outputs, inputs, opts), opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, takes: list[int], gives: list[int], opts: Any = None
    ) -> Any:
        """All-to-all of parts of one tensor, split along the first dimension."""
        opts = opts or dist.AllToAllOptions()
        # with lists of sizes, each pair of ranks has its own
        call = ("all_to_all", output.dtype, None if takes or gives else (input.numel(),))
        return self._run(call, "alltoall_base", (output, input, takes, gives, opts), opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Return when all ranks have called it."""
        opts = opts or dist.BarrierOptions()
        return self._run(("barrier",), "barrier", (opts,), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error on rank 0 names the ranks that did not call it."""
        given = () if timeout is None else (timeout,)
        self._gloo.monitored_barrier(*given, wait_all_ranks=wait_all_ranks)

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        """Start a send."""
        return GlooMessage(self._gloo.send(tensors, dst, tag), tensors, MessageText("send", self, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        """Start a receive."""
        if src < 0:
            return self.recv_anysource(tensors, tag)
        return GlooMessage(self._gloo.recv(tensors, src, tag), tensors, MessageText("recv", self, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Start a receive from the rank that sends first."""
        return GlooMessage(
            self._gloo.recv_anysource(tensors, tag), tensors, MessageText("recvAnySource", self, -1, tag)
        )

    def shutdown(self) -> None:
        """Leave the group; what is still open has ended with it."""
        stop_answering(self._look)
        self._gloo = LeftGroup()
        self._sweep(everything=True)

    abort = shutdown


def _parts(name: str, tensors: Sequence[Tensor], op: str = "", root: int | None = None) -> CallParts:
    if len(tensors) == 1:
        tensor = tensors[0]
        return name, tensor.dtype, (tensor.numel(),), op, root
    return name, tensors[0].dtype if tensors else None, tuple(t.numel() for t in tensors), op, root


def _operator(opts: Any) -> str:
    if opts.reduceOp == _SUM:
        return "sum"
    try:
        return operator_name(opts)
    except RefusedCall:  # gloo decides about it
        return str(opts.reduceOp)
