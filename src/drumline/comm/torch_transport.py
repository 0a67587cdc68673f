"""Ranks as processes of a torch.distributed group: messages over gloo, and between GPUs over nccl.

NCCL has no tags: it carries the rounds of a schedule, whose order all ranks know. Everything else goes over gloo, and
GPU tensors through host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import GaveUp, InputError
from ..torchkit.process_groups import store_of
from .transport import NativeCollective, PendingMessage, StagedReceive, Transport

_TAGGED = ("gloo", "shm", "mpi4py")
"""Backends whose messages have tags."""
_NOTE_SECONDS = 0.5
"""Time for ranks to leave a note in the store after a failed wait."""


class _Work:
    """A message in progress, with the error text if it fails."""

    def __init__(self, transport: TorchTransport, work: dist.Work, tensor: Tensor, what: str) -> None:
        # The tensor is kept alive until the wait, because the backend stores only its address.
        self._transport, self._work, self._tensor, self._what = transport, work, tensor, what

    def wait(self) -> None:
        """Block until it is sent or received."""
        try:
            if self._transport.timeout is None:
                self._work.wait()
            else:
                self._work.wait(self._transport.timeout)
        except RuntimeError as e:
            raise self._transport.failure(self._what, e) from e


class _NcclBatch:
    """All messages of one round over NCCL."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Let the current stream wait for them."""
        while self._works:
            self._works.pop().wait()


class TorchTransport(Transport):
    """The ranks of a process group, by their numbers in the group."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> None:
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised", fix="call torch.distributed.init_process_group(backend='gloo')"
            )
        backend = dist.get_backend_config(group)
        if not any(name in backend for name in (*_TAGGED, "nccl")):
            raise InputError(
                f"a process group of {backend}",
                rule=f"messages go by {', '.join(_TAGGED)}, and between GPUs by nccl",
                fix="torch.distributed.new_group(backend='gloo')",
            )
        self._group = group
        self._nccl = "nccl" in backend
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._host: dist.ProcessGroup | None = group
        if not any(name in backend for name in _TAGGED):
            ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            self._host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.name = "nccl" if self._nccl else next(name for name in _TAGGED if name in backend)

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return self._size

    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        """Start a send; also GPU tensors go over gloo, because a single message needs its tag."""
        plain = _bytes(tensor.cpu() if tensor.is_cuda else tensor)
        work = dist.isend(plain, group=self._host, group_dst=dst, tag=tag)
        return self._pending(work, plain, f"rank {self._rank} could not send to rank {dst}")

    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        """Start a receive."""
        plain = _bytes(torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor)
        work = dist.irecv(plain, group=self._host, group_src=src, tag=tag)
        pending = self._pending(work, plain, f"rank {self._rank} could not receive from rank {src}")
        return StagedReceive(pending, plain.view(tensor.dtype), tensor) if tensor.is_cuda else pending

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> tuple[list[PendingMessage], list[PendingMessage]]:
        """Start a round; NCCL gets all its messages at once, or two ranks that send to each other would deadlock."""
        if self._nccl and any(tensor.is_cuda for tensor, _ in (*sends, *receives)):
            batch: PendingMessage = self._nccl_batch(sends, receives)
            return [batch] * len(receives), [batch]
        return super().exchange(sends, receives, tag)

    def native(self, collective: str) -> NativeCollective | None:
        """The backend's own collective."""
        run = _NATIVE.get(collective)
        if run is None:
            return None

        def call(source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
            some = source if source is not None else target
            on_gpu = some is not None and some.is_cuda
            if on_gpu and not self._nccl:
                return False
            group = self._group if on_gpu else self._host
            try:
                return run(_TorchCall(source, target, op, root, group, self._size))
            except RuntimeError as e:
                raise self.failure(f"rank {self._rank} could not finish {collective}", e) from e

        return call

    def failure(self, what: str, error: RuntimeError) -> GaveUp:
        """The error to raise when a message failed: names the ranks that are missing and where the others wait."""
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        notes = self._notes()
        absent = [r for r, note in enumerate(notes) if not note]
        lines = [f"rank {r}: {note}" for r, note in enumerate(notes) if note and r != self._rank]
        lines += [f"rank {r} has not called it" for r in absent]
        return GaveUp(
            what + "".join(f"\n    {line}" for line in lines),
            where=str(self.current_call or ""),
            rule=f"all ranks call the same collectives in the same order; {reason}",
        )

    def _notes(self) -> list[str]:
        """Publish this rank's current call in the store and read those of the others whose wait failed too."""
        notes = [""] * self._size
        notes[self._rank] = str(self.current_call or "a message")
        store = store_of(self._host)
        end = time.monotonic() + _NOTE_SECONDS
        try:
            store.set(f"drumline/waited/{self._rank}", notes[self._rank])
            while not all(notes) and time.monotonic() < end:
                time.sleep(0.02)
                for rank in (r for r, note in enumerate(notes) if not note):
                    if store.check([f"drumline/waited/{rank}"]):
                        notes[rank] = store.get(f"drumline/waited/{rank}").decode()
        except RuntimeError:
            pass  # the store ended with the rank that hosted it: nothing more to learn
        return notes

    def _nccl_batch(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> _NcclBatch:
        operations: list[tuple[Callable[..., object], Tensor, int]] = [
            *((dist.irecv, tensor, src) for tensor, src in receives),
            *((dist.isend, tensor, dst) for tensor, dst in sends),
        ]
        nonempty = [
            dist.P2POp(operation, _bytes(tensor), group=self._group, group_peer=peer)
            for operation, tensor, peer in operations
            if tensor.numel()
        ]
        return _NcclBatch(dist.batch_isend_irecv(nonempty) if nonempty else ())

    def _pending(self, work: dist.Work | None, tensor: Tensor, what: str) -> PendingMessage:
        assert work is not None, "torch returns None only to a process outside of the group"
        return _Work(self, work, tensor, what)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: moving needs no type, and backends do not support every one."""
    return tensor.view(-1).view(torch.uint8)


# -- the collectives of torch.distributed's backends ------------------------------------------------------------------

# newer torch releases renamed these two
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_BITWISE = ("band", "bor", "bxor")
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_INTEGERS = {torch.int8, torch.uint8, torch.int32, torch.int64}


@dataclass(frozen=True, slots=True)
class _TorchCall:
    """The arguments of a native collective."""

    source: Tensor | None
    target: Tensor | None
    op: str
    root: int
    group: dist.ProcessGroup | None
    ranks: int

    @property
    def given(self) -> Tensor:
        """The source, where every rank has one."""
        assert self.source is not None
        return self.source

    @property
    def result(self) -> Tensor:
        """The target, where every rank has one."""
        assert self.target is not None
        return self.target

    def rows(self, tensor: Tensor | None) -> list[Tensor] | None:
        """A tensor as one row of bytes per rank."""
        return None if tensor is None else list(_bytes(tensor).view(self.ranks, -1).unbind(0))

    def supports(self, tensor: Tensor) -> bool:
        """Whether the backend has this operator for this type."""
        if tensor.is_cuda and self.op in _BITWISE:
            return False  # nccl has none
        return self.op in _OPERATIONS and tensor.dtype in (_INTEGERS if self.op in _BITWISE else _FLOATS | _INTEGERS)

    def average(self, tensor: Tensor) -> None:
        """Divide the sum where a mean is asked for."""
        if self.op == "avg":
            tensor.div_(self.ranks)


def _all_reduce(call: _TorchCall) -> bool:
    if not call.supports(call.result):
        return False
    dist.all_reduce(call.result, op=_OPERATIONS[call.op], group=call.group)
    call.average(call.result)
    return True


def _reduce(call: _TorchCall) -> bool:
    if not call.supports(call.given):
        return False
    work = call.given.clone() if call.target is None else call.target.copy_(call.given)  # torch reduces in place
    dist.reduce(work, group_dst=call.root, op=_OPERATIONS[call.op], group=call.group)
    if call.target is not None:
        call.average(call.target)
    return True


def _reduce_scatter(call: _TorchCall) -> bool:
    if not call.supports(call.given):
        return False
    _REDUCE_SCATTER(call.result, call.given, op=_OPERATIONS[call.op], group=call.group)
    call.average(call.result)
    return True


def _moves(move: Callable[[_TorchCall], object]) -> Callable[[_TorchCall], bool]:
    """A collective that does not reduce: every backend has it for every type."""

    def run(call: _TorchCall) -> bool:
        move(call)
        return True

    return run


_NATIVE: dict[str, Callable[[_TorchCall], bool]] = {
    "all_reduce": _all_reduce,
    "all_gather": _moves(lambda c: _ALL_GATHER(_bytes(c.result), _bytes(c.given), group=c.group)),
    "reduce_scatter": _reduce_scatter,
    "broadcast": _moves(lambda c: dist.broadcast(_bytes(c.result), group_src=c.root, group=c.group)),
    "reduce": _reduce,
    "gather": _moves(lambda c: dist.gather(_bytes(c.given), c.rows(c.target), group_dst=c.root, group=c.group)),
    "scatter": _moves(lambda c: dist.scatter(_bytes(c.result), c.rows(c.source), group_src=c.root, group=c.group)),
    "all_to_all": _moves(lambda c: dist.all_to_all_single(_bytes(c.result), _bytes(c.given), group=c.group)),
    "barrier": _moves(lambda c: dist.barrier(group=c.group)),
}
"""By collective; no backend has scan and exscan."""
