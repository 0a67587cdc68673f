"""Communicators: groups of ranks, each with its own message contexts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, Self

import torch

from ..comm.hosts import host_digest
from . import constants as C
from .collectives import ObjectCollectives
from .exception import MPIError
from .group import Group, GroupMembers
from .handles import PREDEFINED
from .info import INFO_NULL, Described, Info
from .memory import check_attachable
from .partitioned import PartitionedMessages
from .pending import PendingOperation
from .persistent_collectives import PersistentCollectives
from .request import Request
from .state import CommState
from .topology import ProcessTopology


class Comm(ObjectCollectives, PersistentCollectives, PartitionedMessages, Described, family=True):
    """A communicator; here all are intra-communicators."""

    __slots__ = ()
    _null_name = "MPI_COMM_NULL"
    _classes: ClassVar[dict[int, type[Comm]]] = {}
    """The classes of communicators with each topology, and of those without one."""

    _predefined_keys = (C.TAG_UB, C.IO, C.WTIME_IS_GLOBAL, C.UNIVERSE_SIZE, C.APPNUM, C.LASTUSEDCODE)

    def __init_subclass__(cls, *, topology: int | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if topology is not None:
            cls._classes[topology] = cls

    @staticmethod
    def _class_of(state: CommState) -> type[Comm]:
        """The class of a communicator."""
        return Comm._classes[C.UNDEFINED if state.topology is None else state.topology.kind]

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """The communicator with a number, of the class that fits its topology."""
        comm = super().fromhandle(handle)
        return Comm._class_of(comm._state)._of(comm._h) if comm else Comm()

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
        """CART, GRAPH, DIST_GRAPH, or UNDEFINED for none."""
        topology = self._state.topology
        return C.UNDEFINED if topology is None else topology.kind

    topology = property(Get_topology, doc="The kind of its topology.")
    is_topo = property(lambda self: self.Get_topology() != C.UNDEFINED, doc="Whether it has a topology.")

    # -- construction -------------------------------------------------------------------------------------------------

    def _child(self, members: Sequence[int], *kind: object, topology: ProcessTopology | None = None) -> Any:
        """A communicator of some of the ranks, null on the others. All ranks call it, to keep their counts equal."""
        inside = self._state.matcher.rank in members
        state = self._state.child("", members if inside else self._state.members, *kind)
        state.errhandler, state.topology = self._state.errhandler, topology
        made = Comm._class_of(state)
        return made._of(state) if inside else made()

    def Clone(self) -> Self:
        """Duplicate it: the same ranks and topology in a new context."""
        made = type(self)._of(self._child(self._state.members, "dup", topology=self._state.topology)._h)
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
        made: Comm = self._child(members, "create")
        return made

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """A communicator of the ranks with the same color, ordered by key and then by rank."""
        if color < 0 and color != C.UNDEFINED:
            raise MPIError(C.ERR_ARG, f"color {color}", rule="color >= 0, or UNDEFINED")
        state = self._state
        rows = state.blocking.comm.all_gather(torch.tensor([color, key])).tolist()
        members = sorted((row[1], rank) for rank, row in enumerate(rows) if row[0] == color)
        return self._chosen(color, [state.members[rank] for _, rank in members], "split")

    def _chosen(self, color: int, members: list[int], kind: str) -> Comm:
        made: Comm = self._child([] if color == C.UNDEFINED else members, kind)
        return made

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
        if any(state is handle._h for handle in PREDEFINED.values()):
            raise MPIError(C.ERR_COMM, f"Free of {state.name}", rule="COMM_WORLD and COMM_SELF cannot be freed")
        self._delete_attributes()
        state.free()
        self._h = None

    Disconnect = Free

    def _predefined(self, keyval: int) -> Any:
        _ = self._state
        return {C.TAG_UB: C.TAG_LIMIT, C.WTIME_IS_GLOBAL: 0, C.LASTUSEDCODE: C.ERR_LASTCODE}.get(keyval)

    # -- hints, buffers, end ------------------------------------------------------------------------------------------

    def Attach_buffer(self, buf: Any) -> None:
        """Attach a buffer; buffered sends allocate their own."""
        check_attachable(buf)
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


class Intercomm(Comm):
    """Inter-communicators are not supported: only the null one exists."""

    __slots__ = ()


COMM_NULL = Comm._constant("COMM_NULL")
