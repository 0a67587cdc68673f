"""Communicators: groups of ranks, each with its own message contexts."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, TypeVar

import torch

from ..comm.hosts import host_digest
from ..comm.messaging.endpoint import Endpoint
from ..comm.messaging.matching import MessageMatcher
from ..comm.messaging.thread_endpoint import run_endpoints
from . import constants as C
from . import world
from .collectives import ObjectCollectives
from .exception import MPIError
from .group import GROUP_EMPTY, Group, GroupMembers
from .info import INFO_NULL, Described, Info
from .request import PendingOperation, Request
from .state import CommState, context_number

T = TypeVar("T")

_from_group: dict[object, int] = {}


class Comm(ObjectCollectives, Described, family=True):
    """A communicator; here all are intra-communicators."""

    __slots__ = ()
    _null_name = "MPI_COMM_NULL"

    @classmethod
    def _world_of(cls, matcher: MessageMatcher) -> Self:
        state = CommState(context_number("world"), "MPI_COMM_WORLD")
        state.join(matcher, range(matcher.size))
        return cls._of(state)

    # -- ranks --------------------------------------------------------------------------------------------------------

    def Get_rank(self) -> int:
        """This rank's number."""
        return self._state.rank

    def Get_size(self) -> int:
        """Number of ranks."""
        return self._state.size

    rank = property(Get_rank, doc="This rank's number.")
    size = property(Get_size, doc="Number of ranks.")

    def Get_group(self) -> Group:
        """Its ranks."""
        state = self._state
        return Group._of(GroupMembers(state.members, state.matcher.rank))

    group = property(Get_group, doc="Its ranks.")

    def Compare(self, comm: Comm) -> int:
        """IDENT, CONGRUENT (the same ranks), SIMILAR (in another order) or UNEQUAL."""
        if self._state is comm._state:
            return C.IDENT
        same = self.Get_group().Compare(comm.Get_group())
        return C.CONGRUENT if same == C.IDENT else same

    def Is_inter(self) -> bool:
        """Whether it is an inter-communicator: never."""
        _ = self._state
        return False

    def Is_intra(self) -> bool:
        """Whether it is an intra-communicator: always."""
        return not self.Is_inter()

    is_inter = property(Is_inter, doc="Whether it is an inter-communicator.")
    is_intra = property(Is_intra, doc="Whether it is an intra-communicator.")

    def Get_topology(self) -> int:
        """UNDEFINED: topologies are not supported."""
        _ = self._state
        return C.UNDEFINED

    topology = property(Get_topology, doc="UNDEFINED: topologies are not supported.")
    is_topo = property(lambda self: False, doc="Whether it has a topology.")

    # -- construction -------------------------------------------------------------------------------------------------

    def _child(self, members: Sequence[int], *kind: object) -> Self:
        state = self._state.child("", members, *kind)
        state.errhandler = self._state.errhandler
        return type(self)._of(state)

    def Clone(self) -> Self:
        """Duplicate it: the same ranks in a new context."""
        made = self._child(self._state.members, "dup")
        self._copy_attributes_to(made)
        return made

    def Dup(self, info: Info | None = None) -> Self:
        """Duplicate it: the same ranks in a new context."""
        made = self.Clone()
        if info:
            made.Set_info(info)
        return made

    def Dup_with_info(self, info: Info) -> Self:
        """Duplicate it with other hints."""
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple[Self, Request]:
        """Duplicate it; nothing is sent, so the request is complete."""
        return self.Dup(info), Request._of(PendingOperation(None, ()))

    Idup_with_info = Idup

    def Create(self, group: Group) -> Comm:
        """A communicator of some of the ranks; null on the others. All ranks call it."""
        state, members = self._state, group._state.ranks
        if any(r not in state.index for r in members):
            raise MPIError(C.ERR_GROUP, "ranks that are not of this communicator", rule="a group of its ranks")
        if state.matcher.rank not in members:
            state.child("", state.members, "create")  # keeps the count equal on all ranks
            return Intracomm()
        return self._child(members, "create")

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """A communicator of the ranks with the same color, ordered by key and then by rank."""
        if color < 0 and color != C.UNDEFINED:
            raise MPIError(C.ERR_ARG, f"color {color}", rule="color >= 0, or UNDEFINED")
        state = self._state
        rows = state.blocking.comm.all_gather(torch.tensor([color, key])).tolist()
        members = sorted((row[1], rank) for rank, row in enumerate(rows) if row[0] == color)
        return self._chosen(color, [state.members[rank] for _, rank in members], "split")

    def _chosen(self, color: int, members: list[int], kind: str) -> Comm:
        if color == C.UNDEFINED:
            self._state.child("", self._state.members, kind)
            return Intracomm()
        return self._child(members, kind)

    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> Comm:
        """A communicator of the ranks that share a host."""
        guided = split_type in (C.COMM_TYPE_HW_GUIDED, C.COMM_TYPE_RESOURCE_GUIDED)
        if guided and info.get("mpi_hw_resource_type") != "mpi_shared_memory":
            split_type = C.UNDEFINED
        if split_type == C.COMM_TYPE_HW_UNGUIDED:
            split_type = C.UNDEFINED  # nothing smaller than a host is distinguished
        if split_type not in (C.UNDEFINED, C.COMM_TYPE_SHARED) and not guided:
            raise MPIError(C.ERR_ARG, f"split type {split_type}", rule="COMM_TYPE_SHARED, or UNDEFINED")
        host = int.from_bytes(host_digest()[:7], "little")
        rows = self._state.blocking.comm.all_gather(torch.tensor([host, split_type, key])).tolist()
        mine = rows[self._state.rank]
        members = sorted((row[2], rank) for rank, row in enumerate(rows) if row[:2] == mine[:2])
        return self._chosen(split_type, [self._state.members[rank] for _, rank in members], "split")

    def Free(self) -> None:
        """Free it."""
        state = self._state
        if any(state is comm._h for comm in (COMM_WORLD, COMM_SELF)):
            raise MPIError(C.ERR_COMM, f"Free of {state.name}", rule="COMM_WORLD and COMM_SELF cannot be freed")
        self._delete_attributes()
        state.free()
        self._h = None

    Disconnect = Free

    # -- hints, buffers, end ------------------------------------------------------------------------------------------

    def Attach_buffer(self, buf: Any) -> None:
        """Attach a buffer; buffered sends allocate their own."""
        self._state.buffer = buf

    def Detach_buffer(self) -> Any:
        """Detach and return the buffer."""
        buf, self._state.buffer = self._state.buffer, None
        return buf

    def Flush_buffer(self) -> None:
        """Do nothing: no send is held back."""
        _ = self._state

    def Iflush_buffer(self) -> Request:
        """Do nothing: no send is held back."""
        self.Flush_buffer()
        return Request._of(PendingOperation(None, ()))

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End this rank at once; the launcher ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(errorcode or 1)

    @classmethod
    def Get_parent(cls) -> Intercomm:
        """The null communicator: these ranks were not spawned."""
        return Intercomm()


class Intracomm(Comm):
    """A communicator of one group."""

    __slots__ = ()

    def Create_group(self, group: Group, tag: int = 0) -> Intracomm:
        """A communicator of some of the ranks; only those ranks call it."""
        members = group._state.ranks
        if self._state.matcher.rank not in members:
            return Intracomm()
        return self._child(members, "group", members, tag)

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "drumline", info: Info = INFO_NULL, errhandler: Any = None
    ) -> Intracomm:
        """A communicator of a group without a parent; its ranks identify it by a string."""
        if group == GROUP_EMPTY:
            return Intracomm()
        kind = ("from group", group._state.ranks, stringtag)
        nth = _from_group[kind] = _from_group.get(kind, 0) + 1
        state = CommState(context_number(*kind, nth), "")
        state.join(world.matcher(), group._state.ranks)
        return cls._of(state)


class Intercomm(Comm):
    """Inter-communicators are not supported: only the null one exists."""

    __slots__ = ()


class Topocomm(Intracomm):
    """Topologies are not supported."""

    __slots__ = ()


class Cartcomm(Topocomm):
    """Cartesian topologies are not supported."""

    __slots__ = ()


class Graphcomm(Topocomm):
    """Graph topologies are not supported."""

    __slots__ = ()


class Distgraphcomm(Topocomm):
    """Distributed graph topologies are not supported."""

    __slots__ = ()


def _all_ranks() -> tuple[MessageMatcher, Sequence[int]]:
    m = world.matcher()
    return m, range(m.size)


def _this_rank() -> tuple[MessageMatcher, Sequence[int]]:
    m = world.matcher()
    return m, [m.rank]


COMM_NULL = Comm._constant("COMM_NULL")
COMM_WORLD = Intracomm._constant("COMM_WORLD", CommState(context_number("world"), "MPI_COMM_WORLD", _all_ranks))
COMM_SELF = Intracomm._constant("COMM_SELF", CommState(context_number("self"), "MPI_COMM_SELF", _this_rank))


def _comm_lock_table(comm: Comm) -> dict[Any, threading.Lock]:
    """The locks of a communicator's object collectives, by name."""
    return comm._state.locks


def run_threads(function: Callable[[Intracomm], T], p: int) -> list[T]:
    """Run `function(comm)` on p ranks that are threads of this process; returns their results by rank."""

    def rank(endpoint: Endpoint) -> T:
        with world.thread_rank(endpoint) as matcher:
            return function(Intracomm._world_of(matcher))

    return run_endpoints(rank, p)
