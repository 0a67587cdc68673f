"""The torch.distributed backend `mpi4py`: torch's collectives by MPI's own, without a torch compiled for MPI.

The name `mpi` is taken: torch refuses it before it looks at registered backends, where it was built without MPI.
`init_method="mpi://"` finds the peers of mpiexec through MPI, for this backend and for every other.
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
from ..calls import Crossings, Signature, Site, crossed_calls, different_calls
from ..ops import name_of
from ..torchgroup.engine import Engine, Message
from ..torchgroup.group import EngineGroup
from . import letter as mpiletter
from .collectives import MpiCollectives, can_reduce
from .world import load, world

NAME = "mpi4py"
_WORD = struct.Struct("<QQ")
_TEXT = 768
"""Bytes of a call and its line in words."""
_EXCHANGE = 1
"""MPI's tag for the messages of an exchange; those of users have a communicator of their own."""


def register() -> None:
    """Make the backend and the way to meet known to torch. mpi4py is loaded when they are used."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler("mpi", _meet)


def _create(options: Any, _: Any) -> EngineGroup:
    """What torch calls for every group of this backend."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    engine = MpiEngine(_members(store, rank, size), timeout.total_seconds())
    return EngineGroup(NAME, engine, store, rank, size, timeout)


def _meet(url: str, timeout: timedelta = timedelta(minutes=5), **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """The handler of `mpi://`."""
    from ..meet import meet

    yield meet(timeout), world().Get_rank(), world().Get_size()
    raise RuntimeError("ranks of mpiexec meet once")


def _members(store: dist.Store, rank: int, size: int) -> Any:
    """The MPI communicator of a group, in torch's order of ranks."""
    everyone = world()
    if everyone.Get_size() < size:
        raise InputError(
            f"a group of {size} ranks, but MPI knows {everyone.Get_size()}",
            rule="MPI's ranks are started by mpiexec",
            fix=f"mpiexec -n {size} python ...",
        )
    store.set(f"mpi/{rank}", str(everyone.Get_rank()))
    ranks = [int(store.get(f"mpi/{r}")) for r in range(size)]
    return everyone.Create_group(everyone.Get_group().Incl(ranks))


class MpiEngine(Engine):
    """MPI's collectives and messages among the ranks of an mpi4py communicator. All of them make it together."""

    def __init__(self, comm: Any, timeout: float) -> None:
        self._own = MpiCollectives(comm, timeout=timeout)
        self._letters = comm.Dup()
        self._timeout = timeout
        self._largest_tag = load().COMM_WORLD.Get_attr(load().TAG_UB)
        self._site = Site("", 0)
        self._number = 0
        self._crossings = Crossings(self._own.size)

    def at_site(self, site: Site) -> None:
        """The line of the call that follows."""
        self._site = site

    def all_reduce(self, tensor: Tensor, op: str, call: Signature, *, root: int = -1) -> None:
        """In place, on all ranks, or on the root alone."""
        self._agree(call)
        _reducible(op, tensor.dtype)
        if root < 0:
            self._own.all_reduce(tensor.view(-1), op)
        else:
            flat = tensor.view(-1)
            self._own.reduce(flat, flat if self._own.rank == root else None, op, root)

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: Signature) -> None:
        """Blocks that are not neighbours in memory are laid out one after the other first."""
        self._agree(call)
        _reducible(op, out.dtype)
        whole = _neighbours(blocks)
        whole = torch.cat([block.view(-1) for block in blocks]) if whole is None else whole
        self._own.reduce_scatter(whole, out.view(-1), op)

    def broadcast(self, tensor: Tensor, root: int, call: Signature) -> None:
        """From the root to all."""
        self._agree(call)
        self._own.broadcast(tensor, root)

    def all_gather(self, mine: Tensor, outs: Sequence[Tensor], call: Signature) -> None:
        """Straight into `outs` where they are neighbours in memory."""
        self._agree(call)
        whole = _neighbours(outs)
        if whole is not None and not _overlaps(mine, whole):
            return self._own.all_gather(mine, whole)
        table = mine.new_empty(mine.numel() * len(outs))
        self._own.all_gather(mine, table)
        for out, part in zip(outs, table.view(len(outs), -1), strict=True):
            out.view(-1).copy_(part)
        return None

    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: Signature) -> None:
        """A message to and from every rank that there is something for, from memory to memory."""
        self._agree(call)
        comm = self._own.comm
        letters = [
            mpiletter.receive(comm, tensor, src, _EXCHANGE, timeout=self._timeout)
            for src, tensor in enumerate(into)
            if tensor is not None
        ]
        letters += [
            mpiletter.send(comm, tensor, dst, _EXCHANGE, timeout=self._timeout)
            for dst, tensor in enumerate(out)
            if tensor is not None
        ]
        for letter in letters:
            letter.wait()

    def barrier(self, call: Signature, timeout: float | None = None) -> None:
        """That all agree shows that all are here."""
        self._own.timeout = self._timeout if timeout is None else timeout
        try:
            self._agree(call)
        finally:
            self._own.timeout = self._timeout

    def send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        """Start a message."""
        return mpiletter.send(self._letters, tensor, dst, self._tag(tag), timeout=self._timeout)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Message:
        """Start to receive, from anybody if `src` is -1."""
        return mpiletter.receive(self._letters, tensor, src, self._tag(tag), timeout=self._timeout)

    def close(self) -> None:
        """Nothing: freeing a communicator needs all ranks, and not all may be there. They end with MPI."""

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise InputError(f"tag {tag}", rule=f"tags of this MPI are from 0 to {self._largest_tag}")
        return tag

    def _agree(self, call: Signature) -> None:
        """Return when all ranks make the same call; raise the same error on all of them if they do not."""
        self._number += 1
        words = [_WORD.unpack(word) for word in self._own.all_words(_WORD.pack(call.hash, self._site.hash))]
        if any(hash != call.hash for hash, _ in words):
            raise different_calls(self._tell(call), f"call {self._number}")
        sites = tuple(site for _, site in words)
        if len(set(sites)) > 1 and (crossed := self._crossings.add(call.hash, sites, self._number)) is not None:
            raise crossed_calls(self._tell(call), *crossed, f"call {self._number}")

    def _tell(self, call: Signature) -> list[tuple[str, str]]:
        """Every rank's call and line in words."""
        text = f"{call.text[: _TEXT // 3]}\n{self._site.text[-_TEXT // 3 :]}".encode()[:_TEXT].ljust(_TEXT, b"\0")
        told = (raw.rstrip(b"\0").decode(errors="replace").partition("\n") for raw in self._own.all_words(text))
        return [(said, where) for said, _, where in told]


def _reducible(op: str, dtype: torch.dtype) -> None:
    if not can_reduce(op, dtype):
        raise InputError(f"{op} of {name_of(dtype)}", rule="MPI has no such reduction", fix="convert the tensor")


def _neighbours(tensors: Sequence[Tensor]) -> Tensor | None:
    """Equal tensors that lie one after the other in memory, as one; None where they do not."""
    first = tensors[0]
    size = first.numel() * first.element_size()
    same = all(t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for t in tensors)
    if not same or any(t.data_ptr() != first.data_ptr() + i * size for i, t in enumerate(tensors)):
        return None
    return first.as_strided((first.numel() * len(tensors),), (1,))


def _overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory, which MPI forbids between input and output."""
    ends = [t.data_ptr() + t.numel() * t.element_size() for t in (a, b)]
    return max(a.data_ptr(), b.data_ptr()) < min(ends)
