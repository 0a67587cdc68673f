"""The torch.distributed backend `checked_gloo`: torch's gloo, with calls compared between ranks and reported.

Every call is passed on to a ProcessGroupGloo. Before that, it is put into the status of this rank, and compared with
the calls of the other ranks unless it repeats earlier ones (call_comparison.py): gloo itself ends the process at
different shapes, and adds numbers of different types or of different tensors without an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import DrumlineError
from ...torchkit.autograd import BACKWARD
from ...torchkit.process_groups import AllgatherOptions, has_backend
from ..call_check import LIBRARY_PACKAGES, CallPlace, CallSignature, call_site, signature
from ..environment import CHECKED_GLOO
from ..rank_status import rank_status
from ..signed_store import AlteredStore
from ..tensor_identity import current_name, named_call
from .buffers import RefusedCall, for_torch, operator_name
from .call_comparison import CallComparison, start_answering, stop_answering
from .gloo_works import EndOfMessage, GlooMessage, GlooWork, LeftGroup, SeveralWorks, WeakWork
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
        self.watch_buckets: Callable[[str, float], Any] | None = None
        """Called with the name and bytes of each asynchronous all-reduce: those of DDP. The result's `end()` is called
        when it has ended, or if it is not `timed`, when this rank makes its next call outside of a backward."""
        start_answering(self._look)

    def get_group_store(self) -> dist.Store:
        """The store of the group."""
        return self._store

    def _look(self) -> None:
        """Called by a thread a few times a second."""
        if ended := self._open.sweep():
            rank_status().collective_ended(ended)
        self._calls.answer()

    # -- calls --------------------------------------------------------------------------------------------------------

    def _run(self, parts: CallParts, method: str, arguments: tuple[Any, ...], opts: Any, message: Any = None) -> Any:
        """Compare and report a call, start it by a method of gloo, and wait for it unless it is asynchronous.

        `message` is ended with it.

        Every bucket of every step passes here, between kernels that fill the caches: each line counts.
        """
        calls, status, members = self._calls, rank_status(), self._members or self.members
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
        status.collective_started(
            call.text, site.text, group=members.hash, number=number, peers=members.text, ended=ended
        )
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
                has_ended, message = _end_of(work, message, weak=parts[0] not in _HELD)
                if known is None:
                    self._open.go_on(number, has_ended, message)
                    return GlooWork(work, self._reason, number)
                self._open.asynchronous.append((number, call, site, time.monotonic(), has_ended, message))
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
        opts, message = opts or dist.AllreduceOptions(), None
        if self.watch_buckets is not None and opts.asyncOp:
            message = self.watch_buckets("all_reduce", float(sum(t.nbytes for t in tensors)))
        call = _parts("all_reduce", tensors, "sum" if opts.reduceOp == _SUM else _operator(opts))
        return self._run(call, "allreduce", (tensors, opts), opts, message)

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
        rank_status().collective_ended(self._open.sweep(everything=True))

    abort = shutdown


def _end_of(work: Any, message: Any, *, weak: bool) -> tuple[Callable[[], bool], Any]:
    """How to see that an asynchronous call has ended, and the message to end then, if it does not end by itself.

    `weak`: without holding the work, which would keep temporary results alive.
    """
    if message is None:
        return WeakWork(work).is_completed if weak else work.is_completed, None
    future = work.get_future()  # what DDP waits for: the work itself says so a moment later
    if message.timed:
        future.add_done_callback(EndOfMessage(message))
        return future.done, None
    return future.done, message


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
