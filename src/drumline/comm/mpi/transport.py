"""MPI as a transport, through mpi4py: tensors by MPI's point-to-point messages, and MPI's own collectives."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor

from ...core.errors import GaveUp, InputError
from ..transport import NativeCollective, PendingMessage, StagedReceive, Transport
from .collectives import MpiCollectives, can_reduce
from .world import bytes_of, load, until, world

TAG_BITS = 31
"""Bits of a communicator's tag."""
_COMMS = 16
"""The most MPI communicators that are made to have enough tags."""
_PIECE = 1 << 30
"""Bytes of the longest single message; older MPIs have 31-bit counts."""

_abandoned: list[Any] = []
"""Memory that MPI may still write to after a wait that timed out: kept, so that it is not reused."""


class MpiMessage:
    """A message of the bytes of a contiguous CPU tensor, in one or more pieces. Several threads may test it."""

    def __init__(self, requests: list[Any], size: int, what: str, *, timeout: float, keep: Tensor) -> None:
        self._requests, self._size, self._what, self._timeout = requests, size, what, timeout
        self._status = load().Status()
        self._received = 0
        self._lock = threading.Lock()
        # MPI stores only the address.
        self._keep = keep
        self.source = -1
        """The rank that sent it."""

    def test(self) -> bool:
        """Whether it is complete; raises GaveUp if it failed or has an unexpected size."""
        try:
            with self._lock:
                return self._move()
        except load().Exception as e:
            raise GaveUp(self._what, rule=e.Get_error_string().splitlines()[0]) from e

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is complete."""
        limit = self._timeout if timeout is None else timeout
        if not until(self.test, limit):
            self._give_up(limit)

    def _move(self) -> bool:
        """Test the pieces one by one, because MPI reports errors only for a single one."""
        while self._requests:
            if not self._requests[0].Test(self._status):
                return False
            self._requests.pop(0)
            self._received += self._status.Get_count(load().BYTE)
            self.source = self._status.Get_source()
            if not self._requests and self._size >= 0 and self._received != self._size:
                raise GaveUp(self._what, rule=f"{self._received} bytes were received, {self._size} expected")
        return True

    def _give_up(self, seconds: float) -> None:
        _abandoned.append((self._requests, self._keep))
        if self._size >= 0:
            for request in self._requests:
                with contextlib.suppress(Exception):
                    request.Cancel()
        raise GaveUp(self._what, rule=f"nothing happened for {seconds:g} s")


def send(comm: Any, tensor: Tensor, dst: int, tag: int, *, timeout: float) -> MpiMessage:
    """Start to send a contiguous CPU tensor."""
    requests = [comm.Isend([piece, load().BYTE], dst, tag) for piece in _pieces(tensor)]
    what = f"rank {comm.Get_rank()} could not send to rank {dst}"
    return MpiMessage(requests, -1, what, timeout=timeout, keep=tensor)


def receive(comm: Any, tensor: Tensor, src: int, tag: int, *, timeout: float) -> MpiMessage:
    """Start to receive into a contiguous CPU tensor, from any rank if `src` is -1."""
    pieces = _pieces(tensor)
    if src < 0 and len(pieces) > 1:
        raise InputError(
            f"a message of {tensor.numel() * tensor.element_size()} bytes from any rank",
            rule=f"messages above {_PIECE} bytes are sent in pieces, which need one sender",
            fix="name the sender",
        )
    source = load().ANY_SOURCE if src < 0 else src
    requests = [comm.Irecv([piece, load().BYTE], source, tag) for piece in pieces]
    what = f"rank {comm.Get_rank()} could not receive from {'any rank' if src < 0 else f'rank {src}'}"
    return MpiMessage(requests, tensor.numel() * tensor.element_size(), what, timeout=timeout, keep=tensor)


def _pieces(tensor: Tensor) -> list[Any]:
    """Split the bytes of a tensor into pieces that MPI can count; an empty tensor is one empty message."""
    data = bytes_of(tensor)
    return [data[i : i + _PIECE] for i in range(0, max(1, len(data)), _PIECE)]


class MpiTransport(Transport):
    """The ranks of an mpi4py communicator (default: all that mpiexec started). All ranks make it together."""

    name = "mpi"

    def __init__(self, comm: Any = None, *, timeout: float = 300.0) -> None:
        mpi = load()
        base = world() if comm is None else comm
        bound = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) + 1
        count = -(-(1 << TAG_BITS) // bound)
        if count > _COMMS:
            raise InputError(
                f"an MPI with tags below {bound}",
                rule=f"tags of {TAG_BITS} bits are spread over at most {_COMMS} communicators of MPI",
                fix="use Open MPI or MPICH",
            )
        # MPI guarantees tags up to 32767 only. A tag's high bits select the communicator, its low bits are MPI's tag.
        self._comms = [base.Dup() for _ in range(count)]
        self._bound, self._timeout = bound, timeout
        self._own = MpiCollectives(base, timeout=timeout)
        self._agreeing = MpiCollectives(base, timeout=timeout)
        self._rank, self._size = base.Get_rank(), base.Get_size()

    @property
    def rank(self) -> int:
        """This process's number in the communicator."""
        return int(self._rank)

    @property
    def size(self) -> int:
        """Number of processes in the communicator."""
        return int(self._size)

    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        """Start a send; GPU tensors go through host memory."""
        comm, low = self._comm_and_tag(tag)
        return send(comm, tensor.detach().cpu(), dst, low, timeout=self._timeout)

    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        """Start a receive; GPU tensors go through host memory."""
        comm, low = self._comm_and_tag(tag)
        if tensor.device.type == "cpu":
            return receive(comm, tensor, src, low, timeout=self._timeout)
        host = torch.empty_like(tensor, device="cpu")
        return StagedReceive(receive(comm, host, src, low, timeout=self._timeout), host, tensor)

    def native(self, collective: str) -> NativeCollective | None:
        """MPI's own collective."""
        return _Native(self._own, collective) if collective in _NATIVE else None

    def agree(self, word: bytes) -> list[bytes] | None:
        """All-gather through MPI."""
        return self._agreeing.all_gather_bytes(word)

    def _comm_and_tag(self, tag: int) -> tuple[Any, int]:
        """The MPI communicator and MPI tag of a tag."""
        if not 0 <= tag < 1 << TAG_BITS:
            raise InputError(f"tag {tag}", rule=f"0 <= tag < 2^{TAG_BITS}")
        return self._comms[tag // self._bound], tag % self._bound


class _Native:
    """One of MPI's collectives as a NativeCollective."""

    def __init__(self, own: MpiCollectives, collective: str) -> None:
        self._own, self._collective = own, collective

    def __call__(self, source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
        """Run it; returns False if MPI does not support the operator, type or device."""
        some = source if source is not None else target
        if some is not None and (some.device.type != "cpu" or (op and not can_reduce(op, some.dtype))):
            return False
        _NATIVE[self._collective](self._own, source, target, op, root)
        return True


_NATIVE: dict[str, Any] = {
    "all_reduce": lambda own, source, target, op, root: own.all_reduce(target, op),
    "reduce": lambda own, source, target, op, root: own.reduce(source, target, op, root),
    "reduce_scatter": lambda own, source, target, op, root: own.reduce_scatter(source, target, op),
    "broadcast": lambda own, source, target, op, root: own.broadcast(target if source is None else source, root),
    "all_gather": lambda own, source, target, op, root: own.all_gather(source, target),
    "gather": lambda own, source, target, op, root: own.gather(source, target, root),
    "scatter": lambda own, source, target, op, root: own.scatter(source, target, root),
    "all_to_all": lambda own, source, target, op, root: own.all_to_all(source, target),
    "scan": lambda own, source, target, op, root: own.scan(source, target, op),
    "exscan": lambda own, source, target, op, root: own.scan(source, target, op, exclusive=True),
    "barrier": lambda own, source, target, op, root: own.barrier(),
}
