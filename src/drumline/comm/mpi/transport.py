"""MPI as a transport, through mpi4py: messages by MPI's point-to-point, and its own collectives beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.errors import InputError
from ..transport import Native, Pending, Transport
from .collectives import MpiCollectives, can_reduce
from .letter import Letter, receive, send
from .post import MpiPost
from .world import load, world

__all__ = ["TAG_BITS", "MpiPost", "MpiTransport"]

TAG_BITS = 31
"""The bits that a communicator has for a tag."""
_COMMS = 16
"""The most MPI communicators that are made to have tags enough."""


class _Staged:
    """A receive into host memory that is copied to the device when it is there."""

    def __init__(self, message: Letter, host: Tensor, tensor: Tensor) -> None:
        self._message, self._host, self._tensor = message, host, tensor

    def wait(self) -> None:
        """Block until it is there, and copy."""
        self._message.wait()
        self._tensor.copy_(self._host)


class MpiTransport(Transport):
    """The ranks of an mpi4py communicator (default: all that mpiexec started). All of them make it together."""

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
        # MPI promises tags up to 32767 only. A tag's high bits choose the communicator, its low bits are MPI's tag.
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
        """How many processes the communicator has."""
        return int(self._size)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Start a send; what is on a GPU goes through host memory."""
        comm, low = self._of(tag)
        return send(comm, tensor.detach().cpu(), dst, low, timeout=self._timeout)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Start a receive; what goes to a GPU waits in host memory."""
        comm, low = self._of(tag)
        if tensor.device.type == "cpu":
            return receive(comm, tensor, src, low, timeout=self._timeout)
        host = torch.empty_like(tensor, device="cpu")
        return _Staged(receive(comm, host, src, low, timeout=self._timeout), host, tensor)

    def native(self, collective: str) -> Native | None:
        """MPI's own form of a collective."""
        return _Native(self._own, collective) if collective in _NATIVE else None

    def agree(self, word: bytes) -> list[bytes] | None:
        """One all-gather of MPI."""
        return self._agreeing.all_words(word)

    def _of(self, tag: int) -> tuple[Any, int]:
        """The communicator and MPI's tag for a tag of ours."""
        if not 0 <= tag < 1 << TAG_BITS:
            raise InputError(f"tag {tag}", rule=f"0 <= tag < 2^{TAG_BITS}")
        return self._comms[tag // self._bound], tag % self._bound


class _Native:
    """One of MPI's collectives in the form that a communicator calls."""

    def __init__(self, own: MpiCollectives, collective: str) -> None:
        self._own, self._collective = own, collective

    def __call__(self, source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
        """Run it; False for what MPI has no operator or no memory for."""
        one = source if source is not None else target
        if one is not None and (one.device.type != "cpu" or (op and not can_reduce(op, one.dtype))):
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
