"""Communicators: groups of ranks with contexts of their own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch

from ..comm.hosts import host_digest
from ..comm.mail.matching import Matching
from . import constants as C
from . import world
from .attributes import Attributes
from .exception import MPIError
from .group import GROUP_EMPTY, Group, Members
from .info import INFO_NULL, Info
from .objects import ObjectCollectives
from .request import Pending, Request
from .state import CommState, derive

_from_group: dict[object, int] = {}


class Comm(ObjectCollectives, Attributes, family=True):
    """A communicator of any kind; here they are all intra-communicators."""

    __slots__ = ()

    @classmethod
    def _world_of(cls, matching: Matching) -> Self:
        state = CommState(derive("world"), "MPI_COMM_WORLD")
        state.join(matching, range(matching.size))
        return cls._of(state)

    # -- who ----------------------------------------------------------------------------------------------------------

    def Get_rank(self) -> int:
        """This rank's number."""
        return self._state.rank

    def Get_size(self) -> int:
        """How many ranks there are."""
        return self._state.size

    rank = property(Get_rank, doc="This rank's number.")
    size = property(Get_size, doc="How many ranks there are.")

    def Get_group(self) -> Group:
        """Its ranks."""
        state = self._state
        return Group._of(Members(state.members, state.matching.rank))

    group = property(Get_group, doc="Its ranks.")

    def Compare(self, comm: Comm) -> int:
        """IDENT, CONGRUENT (the same ranks), SIMILAR (in another order) or UNEQUAL."""
        if self._state is comm._state:
            return C.IDENT
        same = self.Get_group().Compare(comm.Get_group())
        return C.CONGRUENT if same == C.IDENT else same

    def Is_inter(self) -> bool:
        """Whether it joins two groups: never."""
        _ = self._state
        return False

    def Is_intra(self) -> bool:
        """Whether it is of one group: always."""
        return not self.Is_inter()

    is_inter = property(Is_inter, doc="Whether it joins two groups.")
    is_intra = property(Is_intra, doc="Whether it is of one group.")

    def Get_topology(self) -> int:
        """UNDEFINED: topologies are not asked for."""
        _ = self._state
        return C.UNDEFINED

    topology = property(Get_topology, doc="UNDEFINED: topologies are not asked for.")
    is_topo = property(lambda self: False, doc="Whether it has a topology.")

    def Get_name(self) -> str:
        """Its name."""
        return self._h.name if self._h is not None else "MPI_COMM_NULL"

    def Set_name(self, name: str) -> None:
        """Give it a name."""
        self._state.name = name

    name = property(Get_name, Set_name, doc="Its name.")

    # -- new ones -----------------------------------------------------------------------------------------------------

    def _child(self, members: Sequence[int], *kind: object) -> Self:
        state = self._state.child("", members, *kind)
        state.errhandler = self._state.errhandler
        return type(self)._of(state)

    def Clone(self) -> Self:
        """The same ranks in a context of their own."""
        made = self._child(self._state.members, "dup")
        self._inherit(made)
        return made

    def Dup(self, info: Info | None = None) -> Self:
        """The same ranks in a context of their own."""
        made = self.Clone()
        if info:
            made.Set_info(info)
        return made

    def Dup_with_info(self, info: Info) -> Self:
        """The same with other hints."""
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple[Self, Request]:
        """The same; nothing is sent, so it is done at once."""
        return self.Dup(info), Request._of(Pending(None, ()))

    Idup_with_info = Idup

    def Create(self, group: Group) -> Comm:
        """A communicator of some of the ranks; null for the others. All ranks call it."""
        state, members = self._state, group._state.ranks
        if any(r not in state.index for r in members):
            raise MPIError(C.ERR_GROUP, "ranks that are not of this communicator", rule="a group of its ranks")
        if state.matching.rank not in members:
            state.child("", state.members, "create")  # counted here as everywhere
            return Intracomm()
        return self._child(members, "create")

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """A communicator of the ranks with the same color, ordered by key and then by rank."""
        if color < 0 and color != C.UNDEFINED:
            raise MPIError(C.ERR_ARG, f"color {color}", rule="color >= 0, or UNDEFINED")
        state = self._state
        rows = state.now.comm.all_gather(torch.tensor([color, key])).tolist()
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
            split_type = C.UNDEFINED  # what is smaller than a host is not told apart
        if split_type not in (C.UNDEFINED, C.COMM_TYPE_SHARED) and not guided:
            raise MPIError(C.ERR_ARG, f"split type {split_type}", rule="COMM_TYPE_SHARED, or UNDEFINED")
        host = int.from_bytes(host_digest()[:7], "little")
        rows = self._state.now.comm.all_gather(torch.tensor([host, split_type, key])).tolist()
        mine = rows[self._state.rank]
        members = sorted((row[2], rank) for rank, row in enumerate(rows) if row[:2] == mine[:2])
        return self._chosen(split_type, [self._state.members[rank] for _, rank in members], "split")

    def Free(self) -> None:
        """Let go of it."""
        state = self._state
        if any(state is one._h for one in (COMM_WORLD, COMM_SELF)):
            raise MPIError(C.ERR_COMM, f"Free of {state.name}", rule="COMM_WORLD and COMM_SELF stay")
        self._forget()
        state.free()
        self._h = None

    Disconnect = Free

    # -- odds and ends ------------------------------------------------------------------------------------------------

    def Set_info(self, info: Info) -> None:
        """Set hints; none means anything here."""
        self._state.info = dict(info.items())

    def Get_info(self) -> Info:
        """The hints that were set."""
        return Info.Create(self._state.info)

    info = property(Get_info, Set_info, doc="The hints.")

    def Attach_buffer(self, buf: Any) -> None:
        """Memory for buffered sends; they find their own."""
        self._state.buffer = buf

    def Detach_buffer(self) -> Any:
        """Give the memory back."""
        buf, self._state.buffer = self._state.buffer, None
        return buf

    def Flush_buffer(self) -> None:
        """Nothing is held back."""
        _ = self._state

    def Iflush_buffer(self) -> Request:
        """Nothing is held back."""
        self.Flush_buffer()
        return Request._of(Pending(None, ()))

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End this rank at once; the launcher ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(errorcode or 1)

    @classmethod
    def Get_parent(cls) -> Intercomm:
        """Null: nobody started these ranks by MPI."""
        return Intercomm()


class Intracomm(Comm):
    """A communicator of one group."""

    __slots__ = ()

    def Create_group(self, group: Group, tag: int = 0) -> Intracomm:
        """A communicator of some of the ranks; only they call it."""
        members = group._state.ranks
        if self._state.matching.rank not in members:
            return Intracomm()
        return self._child(members, "group", members, tag)

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "drumline", info: Info = INFO_NULL, errhandler: Any = None
    ) -> Intracomm:
        """A communicator of a group, without another one; its ranks name it by a string."""
        if group == GROUP_EMPTY:
            return Intracomm()
        kind = ("from group", group._state.ranks, stringtag)
        nth = _from_group[kind] = _from_group.get(kind, 0) + 1
        state = CommState(derive(*kind, nth), "")
        state.join(world.matching(), group._state.ranks)
        return cls._of(state)


class Intercomm(Comm):
    """A communicator between two groups: not asked for, so there is only the null one."""

    __slots__ = ()


class Topocomm(Intracomm):
    """A communicator with a topology: not asked for."""

    __slots__ = ()


class Cartcomm(Topocomm):
    """A communicator with a grid: not asked for."""

    __slots__ = ()


class Graphcomm(Topocomm):
    """A communicator with a graph: not asked for."""

    __slots__ = ()


class Distgraphcomm(Topocomm):
    """A communicator with a graph in pieces: not asked for."""

    __slots__ = ()


def _everyone() -> tuple[Matching, Sequence[int]]:
    m = world.matching()
    return m, range(m.size)


def _alone() -> tuple[Matching, Sequence[int]]:
    m = world.matching()
    return m, [m.rank]


COMM_NULL = Comm._constant("COMM_NULL")
COMM_WORLD = Intracomm._constant("COMM_WORLD", CommState(derive("world"), "MPI_COMM_WORLD", _everyone))
COMM_SELF = Intracomm._constant("COMM_SELF", CommState(derive("self"), "MPI_COMM_SELF", _alone))


def _comm_lock_table(comm: Comm) -> dict[Any, threading.Lock]:
    """The locks of a communicator's collectives of objects, by name."""
    return comm._state.locks
