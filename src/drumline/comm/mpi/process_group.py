"""The torch.distributed backend `mpi4py`: torch's collectives by MPI's own, without a torch built for MPI.

The name `mpi` is taken: a torch built without MPI refuses it before it looks at registered backends.
`init_method="mpi://"` finds the ranks of mpiexec through MPI, for this backend and every other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import InputError
from ...torchkit.process_groups import has_backend
from ..buffers import joined
from ..call_check import (
    CallSignature,
    CallSite,
    CrossingDetector,
    crossed_calls,
    decode_calls,
    different_calls,
    encode_call,
)
from ..operators import dtype_name
from ..process_group.backend import BackendMessage, CollectiveBackend
from ..process_group.group import BackendProcessGroup
from ..tensor_identity import named_call
from .collectives import MpiCollectives, can_reduce
from .transport import receive, send
from .world import load, world

NAME = "mpi4py"
_FINGERPRINT = struct.Struct("<QQ")
_EXCHANGE = 1
"""MPI's tag of the messages of an exchange; users' messages have their own communicator."""


def register() -> None:
    """Register the backend and `mpi://` with torch. mpi4py is loaded at their first use."""
    if not has_backend(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler("mpi", _rendezvous)


def _create(options: Any, _: Any) -> BackendProcessGroup:
    """Create a process group; called by torch."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    engine = MpiBackend(_members(store, rank, size), timeout.total_seconds())
    return BackendProcessGroup(NAME, engine, store, rank, size, timeout)


def _rendezvous(url: str, timeout: timedelta = timedelta(minutes=5), **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """The handler of `mpi://`."""
    from .rendezvous import rendezvous_store

    yield rendezvous_store(timeout), world().Get_rank(), world().Get_size()
    raise RuntimeError("mpi:// supports one rendezvous")


def _members(store: dist.Store, rank: int, size: int) -> Any:
    """The MPI communicator of a group, in torch's rank order."""
    all_ranks = world()
    if all_ranks.Get_size() < size:
        raise InputError(
            f"a group of {size} ranks, but MPI knows {all_ranks.Get_size()}",
            rule="MPI's ranks are started by mpiexec",
            fix=f"mpiexec -n {size} python ...",
        )
    store.set(f"mpi/{rank}", str(all_ranks.Get_rank()))
    ranks = [int(store.get(f"mpi/{r}")) for r in range(size)]
    return all_ranks.Create_group(all_ranks.Get_group().Incl(ranks))


class MpiBackend(CollectiveBackend):
    """MPI's collectives and messages between the ranks of an mpi4py communicator. All ranks make it together."""

    def __init__(self, comm: Any, timeout: float) -> None:
        self._own = MpiCollectives(comm, timeout=timeout)
        self._message_comm = comm.Dup()
        self._timeout = timeout
        self._largest_tag = load().COMM_WORLD.Get_attr(load().TAG_UB)
        self._site = CallSite("", 0)
        self._number = 0
        self._crossings = CrossingDetector(self._own.size)

    def at_site(self, site: CallSite) -> None:
        """Set the line of the next call."""
        self._site = site

    def all_reduce(self, tensor: Tensor, op: str, call: CallSignature, *, root: int = -1) -> None:
        """Reduce in place, on all ranks or on the root alone."""
        self._agree(call)
        _reducible(op, tensor.dtype)
        if root < 0:
            self._own.all_reduce(tensor.view(-1), op)
        else:
            flat = tensor.view(-1)
            self._own.reduce(flat, flat if self._own.rank == root else None, op, root)

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: CallSignature) -> None:
        """Reduce-scatter; blocks that are not adjacent in memory are concatenated first."""
        self._agree(call)
        _reducible(op, out.dtype)
        whole = joined(blocks)
        whole = torch.cat([block.view(-1) for block in blocks]) if whole is None else whole
        self._own.reduce_scatter(whole, out.view(-1), op)

    def broadcast(self, tensor: Tensor, root: int, call: CallSignature) -> None:
        """Copy from the root to all ranks."""
        self._agree(call)
        self._own.broadcast(tensor, root)

    def all_gather(self, mine: Tensor, outs: Sequence[Tensor], call: CallSignature) -> None:
        """All-gather, directly into `outs` if they are adjacent in memory."""
        self._agree(call)
        whole = joined(outs)
        if whole is not None and not _overlaps(mine, whole):
            return self._own.all_gather(mine, whole)
        table = mine.new_empty(mine.numel() * len(outs))
        self._own.all_gather(mine, table)
        for out, part in zip(outs, table.view(len(outs), -1), strict=True):
            out.view(-1).copy_(part)
        return None

    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: CallSignature) -> None:
        """Exchange one message with every rank that has one, from memory to memory."""
        self._agree(call)
        comm = self._own.comm
        pending = [
            receive(comm, tensor, src, _EXCHANGE, timeout=self._timeout)
            for src, tensor in enumerate(into)
            if tensor is not None
        ]
        pending += [
            send(comm, tensor, dst, _EXCHANGE, timeout=self._timeout)
            for dst, tensor in enumerate(out)
            if tensor is not None
        ]
        for message in pending:
            message.wait()

    def barrier(self, call: CallSignature, timeout: float | None = None) -> None:
        """Return when all ranks have called it: comparing the calls is a barrier."""
        self._own.timeout = self._timeout if timeout is None else timeout
        try:
            self._agree(call)
        finally:
            self._own.timeout = self._timeout

    def send(self, tensor: Tensor, dst: int, tag: int) -> BackendMessage:
        """Start a send."""
        return send(self._message_comm, tensor, dst, self._tag(tag), timeout=self._timeout)

    def receive(self, tensor: Tensor, src: int, tag: int) -> BackendMessage:
        """Start a receive, from any rank if `src` is -1."""
        return receive(self._message_comm, tensor, src, self._tag(tag), timeout=self._timeout)

    def close(self) -> None:
        """Do nothing: freeing a communicator needs all ranks, and some may have ended. MPI frees them at its end."""

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise InputError(f"tag {tag}", rule=f"tags of this MPI are from 0 to {self._largest_tag}")
        return tag

    def _agree(self, call: CallSignature) -> None:
        """Return when all ranks make the same call; otherwise raise the same error on all of them."""
        self._number += 1
        call = named_call(call, self._site.name)
        packed = self._own.all_gather_bytes(_FINGERPRINT.pack(call.hash, self._site.hash))
        hashes = [_FINGERPRINT.unpack(each) for each in packed]
        if any(hash != call.hash for hash, _ in hashes):
            raise different_calls(self._all_calls(call), f"call {self._number}")
        sites = tuple(site for _, site in hashes)
        if len(set(sites)) > 1 and (crossed := self._crossings.add(call.hash, sites, self._number)) is not None:
            raise crossed_calls(self._all_calls(call), *crossed, f"call {self._number}")

    def _all_calls(self, call: CallSignature) -> list[tuple[str, str]]:
        """Every rank's (call, site) as text."""
        return decode_calls(self._own.all_gather_bytes(encode_call(call.text, self._site)))


def _reducible(op: str, dtype: torch.dtype) -> None:
    if not can_reduce(op, dtype):
        raise InputError(f"{op} of {dtype_name(dtype)}", rule="MPI has no such reduction", fix="convert the tensor")


def _overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory, which MPI forbids between input and output."""
    ends = [t.data_ptr() + t.numel() * t.element_size() for t in (a, b)]
    return max(a.data_ptr(), b.data_ptr()) < min(ends)
