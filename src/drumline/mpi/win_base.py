"""Windows: construction, queries, and waiting for requests."""

from __future__ import annotations

from typing import Any, Self

import torch

from ..comm.messaging.messages import Waitable
from . import constants as C
from .byte_buffer import buffer
from .comm import Comm
from .exception import MPIError
from .group import Group
from .handles import PREDEFINED
from .info import INFO_NULL, Described, Info
from .intracomm import COMM_SELF
from .memory import BOTTOM, address_of, from_address, memory_of
from .op import Op
from .pending import PendingOperation, null_message
from .shared_memory import SharedMemory
from .state import WINDOW
from .win_target import FLUSH, RankCounter, RmaReply, WindowTarget, check_range


class WindowState:
    """The state of a window."""

    def __init__(self, comm: Comm, memory: Any, unit: int, flavor: int, shared: SharedMemory | None = None) -> None:
        self.comm, self.flavor, self.unit, self.shared = comm.Dup(), flavor, unit, shared
        self.memory = buffer() if memory is None or memory is BOTTOM else buffer(memory)
        self.attached: dict[int, Any] = {}
        self.info: dict[str, str] = {}
        self.attributes: dict[int, Any] = {}
        self.errhandler: Any = None
        self.name = ""
        self.members = self.comm._state.members
        self.touched: set[int] = set()
        self.access: list[int] = []
        self.exposure: RankCounter | None = None
        ops = {name: op for name, op in PREDEFINED.items() if isinstance(op, Op) and op}
        self.window = WindowTarget(self.comm._state.matcher, self.comm._state.context + WINDOW, self._range, ops)
        units = self.comm._state.blocking.comm.all_gather(torch.tensor([unit]))
        self.units: list[int] = units.view(-1).tolist()

    def _range(self, offset: int, length: int) -> memoryview:
        where = f"rank {self.comm._state.rank}"
        if self.flavor != C.WIN_FLAVOR_DYNAMIC:
            return check_range(self.memory.data, offset, length, where)
        for start, memory in self.attached.items():
            if start <= offset and offset + length <= start + len(memory):
                return from_address(offset, length, memory)
        raise ValueError(f"{length} bytes at address {offset} are not attached on {where}")


class WindowBase(Described):
    """The base of `Win`: construction, queries, and waiting."""

    __slots__ = ()
    _null_name = "MPI_WIN_NULL"
    _predefined_keys = (C.WIN_BASE, C.WIN_SIZE, C.WIN_DISP_UNIT, C.WIN_CREATE_FLAVOR, C.WIN_MODEL)
    _h: WindowState | None

    @property
    def _state(self) -> WindowState:
        if self._h is None:
            raise MPIError(C.ERR_WIN, "WIN_NULL", rule="a window that exists")
        return self._h

    # -- construction -------------------------------------------------------------------------------------------------

    @classmethod
    def Create(cls, memory: Any, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Self:
        """A window on existing memory of each rank."""
        if memory is not None and memory is not BOTTOM:
            memory_of(memory, writable=True)
        return cls._of(WindowState(comm, memory, disp_unit, C.WIN_FLAVOR_CREATE))

    @classmethod
    def Allocate(cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Self:
        """A window on new memory."""
        return cls._of(WindowState(comm, buffer.allocate(size), disp_unit, C.WIN_FLAVOR_ALLOCATE))

    @classmethod
    def Create_dynamic(cls, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Self:
        """A window on memory that is attached later; displacements are addresses."""
        return cls._of(WindowState(comm, None, 1, C.WIN_FLAVOR_DYNAMIC))

    @classmethod
    def Allocate_shared(cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Self:
        """A window on new memory that all its ranks map, so they must share a host."""
        if size < 0:
            raise MPIError(C.ERR_SIZE, f"{size} bytes of memory", rule="at least 0")
        sizes = comm._state.blocking.comm.all_gather(torch.tensor([size])).view(-1).tolist()
        shared = SharedMemory(comm, sizes)
        return cls._of(WindowState(comm, shared.part(comm._state.rank), disp_unit, C.WIN_FLAVOR_SHARED, shared))

    def Shared_query(self, rank: int) -> tuple[buffer, int]:
        """A rank's shared memory and its displacement unit; for PROC_NULL, of the lowest rank that has memory."""
        state = self._state
        if state.shared is None:
            raise MPIError(C.ERR_RMA_FLAVOR, "Shared_query of another window", rule="a window of Allocate_shared")
        if rank == C.PROC_NULL:
            rank = state.shared.first_part()
        self._rank(rank)
        return (state.memory if rank == state.comm._state.rank else state.shared.part(rank)), state.units[rank]

    def Attach(self, memory: Any) -> None:
        """Attach memory to a dynamic window."""
        self._state.attached[address_of(memory)] = memory_of(memory, writable=True)

    def Detach(self, memory: Any) -> None:
        """Detach memory from a dynamic window."""
        if self._state.attached.pop(address_of(memory), None) is None:
            raise MPIError(C.ERR_BASE, "memory that is not attached", rule="detach memory that was attached")

    def Free(self) -> None:
        """Free the window after a barrier."""
        state = self._state
        self._flush(state.touched)
        state.comm.Barrier()
        state.window.close()
        self._delete_attributes()
        state.comm.Free()
        self._h = None

    # -- queries ------------------------------------------------------------------------------------------------------

    def _predefined(self, keyval: int) -> Any:
        state = self._state
        return {
            C.WIN_BASE: state.memory.address,
            C.WIN_SIZE: state.memory.nbytes,
            C.WIN_DISP_UNIT: state.unit,
            C.WIN_CREATE_FLAVOR: state.flavor,
            C.WIN_MODEL: C.WIN_UNIFIED,
        }.get(keyval)

    def tomemory(self) -> buffer:
        """This rank's memory."""
        return self._state.memory

    attrs = property(
        lambda self: tuple(self.Get_attr(k) for k in (C.WIN_BASE, C.WIN_SIZE, C.WIN_DISP_UNIT)),
        doc="Address, size and displacement unit.",
    )
    flavor = property(lambda self: self._state.flavor, doc="The constructor that made it.")
    model = property(lambda self: self.Get_attr(C.WIN_MODEL), doc="WIN_UNIFIED: there is one copy of the memory.")

    def Get_group(self) -> Group:
        """Its ranks."""
        return self._state.comm.Get_group()

    group = property(Get_group, doc="Its ranks.")
    group_size = property(lambda self: self._state.comm.Get_size(), doc="Number of ranks.")
    group_rank = property(lambda self: self._state.comm.Get_rank(), doc="This rank's number.")

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < len(self._state.members):
            raise MPIError(C.ERR_RANK, f"rank {rank}", rule=f"0 <= rank < {len(self._state.members)}, or PROC_NULL")
        return self._state.members[rank]

    def _await(self, *items: Waitable) -> None:
        self._state.comm._state.matcher.wait(*items)

    def _flushed(self, rank: int) -> PendingOperation:
        if rank == C.PROC_NULL:
            return null_message()
        reply = self._state.window.request(self._rank(rank), FLUSH, b"", "for requests sent to")
        return PendingOperation(self._state.comm._state.matcher, (reply,), lambda: check_reply(reply))

    def _flush(self, ranks: Any) -> None:
        ranks = sorted(ranks)
        replies = [self._state.window.request(self._rank(r), FLUSH, b"", "for requests sent to") for r in ranks]
        self._await(*replies)
        self._state.touched.difference_update(ranks)
        for reply in replies:
            check_reply(reply)


def check_reply(reply: RmaReply) -> None:
    if reply.failed:
        raise MPIError(C.ERR_RMA_RANGE, reply.data.decode(), rule="one-sided messages stay inside of the window")
