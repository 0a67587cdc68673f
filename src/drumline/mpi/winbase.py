"""Windows: how they are made, what is known of them, and how their requests are waited for."""

from __future__ import annotations

from typing import Any, Self

import torch

from ..comm.mail.message import Item
from . import constants as C
from .attributes import Attributes
from .buffers import BOTTOM, address_of, memory_of
from .comm import COMM_SELF, Comm
from .exception import MPIError
from .foreign import from_address
from .group import Group
from .handle import NAMED
from .info import INFO_NULL, Info
from .memory import buffer
from .op import Op
from .request import Pending, done_already
from .state import WINDOW
from .window import (
    FLUSH,
    Answer,
    Counter,
    Window,
    check_range,
)


class WinState:
    """A window."""

    def __init__(self, comm: Comm, memory: Any, unit: int, flavor: int) -> None:
        self.comm, self.flavor, self.unit = comm.Dup(), flavor, unit
        self.memory = buffer() if memory is None or memory is BOTTOM else buffer(memory)
        self.attached: dict[int, Any] = {}
        self.info: dict[str, str] = {}
        self.attributes: dict[int, Any] = {}
        self.errhandler: Any = None
        self.name = ""
        self.members = self.comm._state.members
        self.touched: set[int] = set()
        self.access: list[int] = []
        self.exposure: Counter | None = None
        ops = {name: op for name, op in NAMED.items() if isinstance(op, Op) and op}
        self.window = Window(self.comm._state.matching, self.comm._state.context + WINDOW, self._stretch, ops)
        units = self.comm._state.now.comm.all_gather(torch.tensor([unit]))
        self.units: list[int] = units.view(-1).tolist()

    def _stretch(self, offset: int, length: int) -> memoryview:
        where = f"rank {self.comm._state.rank}"
        if self.flavor != C.WIN_FLAVOR_DYNAMIC:
            return check_range(self.memory.data, offset, length, where)
        for start, memory in self.attached.items():
            if start <= offset and offset + length <= start + len(memory):
                return from_address(offset, length, memory)
        raise ValueError(f"{length} bytes at address {offset} are not attached on {where}")


class WindowHandle(Attributes):
    """A window: how it is made, what is known of it, and how its requests are waited for."""

    __slots__ = ()
    _h: WinState | None

    @property
    def _state(self) -> WinState:
        if self._h is None:
            raise MPIError(C.ERR_WIN, "WIN_NULL", rule="a window that exists")
        return self._h

    # -- making -----------------------------------------------------------------------------------------------------

    @classmethod
    def Create(cls, memory: Any, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Self:
        """A window on memory that each rank has."""
        if memory is not None and memory is not BOTTOM:
            memory_of(memory, writable=True)
        return cls._of(WinState(comm, memory, disp_unit, C.WIN_FLAVOR_CREATE))

    @classmethod
    def Allocate(cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Self:
        """A window on new memory."""
        return cls._of(WinState(comm, buffer.allocate(size), disp_unit, C.WIN_FLAVOR_ALLOCATE))

    @classmethod
    def Create_dynamic(cls, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Self:
        """A window on memory that is attached later; displacements are addresses."""
        return cls._of(WinState(comm, None, 1, C.WIN_FLAVOR_DYNAMIC))

    @classmethod
    def Allocate_shared(cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Comm = COMM_SELF) -> Self:
        """Not asked for: memory that all ranks of a host see as their own."""
        raise NotImplementedError("Allocate_shared: use Allocate with Put and Get")

    def Attach(self, memory: Any) -> None:
        """Let others reach more memory."""
        self._state.attached[address_of(memory)] = memory_of(memory, writable=True)

    def Detach(self, memory: Any) -> None:
        """No longer."""
        if self._state.attached.pop(address_of(memory), None) is None:
            raise MPIError(C.ERR_BASE, "memory that is not attached", rule="detach what was attached")

    def Free(self) -> None:
        """Close the window, when all ranks have come."""
        state = self._state
        self._flush(state.touched)
        state.comm.Barrier()
        state.window.close()
        self._forget()
        state.comm.Free()
        self._h = None

    # -- about it ---------------------------------------------------------------------------------------------------

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
        doc="Address, size and unit of displacements.",
    )
    flavor = property(lambda self: self._state.flavor, doc="How it was made.")
    model = property(lambda self: self.Get_attr(C.WIN_MODEL), doc="WIN_UNIFIED: there is one copy of the memory.")

    def Get_group(self) -> Group:
        """Its ranks."""
        return self._state.comm.Get_group()

    group = property(Get_group, doc="Its ranks.")
    group_size = property(lambda self: self._state.comm.Get_size(), doc="How many ranks it has.")
    group_rank = property(lambda self: self._state.comm.Get_rank(), doc="This rank's number.")

    def Get_info(self) -> Info:
        """The hints that were set."""
        return Info.Create(self._state.info)

    def Set_info(self, info: Info) -> None:
        """Set hints; none means anything here."""
        self._state.info = dict(info.items())

    info = property(Get_info, Set_info, doc="The hints.")

    def Get_name(self) -> str:
        """Its name."""
        return self._h.name if self._h is not None else "MPI_WIN_NULL"

    def Set_name(self, name: str) -> None:
        """Give it a name."""
        self._state.name = name

    name = property(Get_name, Set_name, doc="Its name.")

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < len(self._state.members):
            raise MPIError(C.ERR_RANK, f"rank {rank}", rule=f"0 <= rank < {len(self._state.members)}, or PROC_NULL")
        return self._state.members[rank]

    def _await(self, *items: Item) -> None:
        self._state.comm._state.matching.wait(*items)

    def _flushed(self, rank: int) -> Pending:
        if rank == C.PROC_NULL:
            return done_already()
        answer = self._state.window.ask(self._rank(rank), FLUSH, b"", "for what was sent to")
        return Pending(self._state.comm._state.matching, (answer,), lambda: good(answer))

    def _flush(self, ranks: Any) -> None:
        ranks = sorted(ranks)
        answers = [self._state.window.ask(self._rank(r), FLUSH, b"", "for what was sent to") for r in ranks]
        self._await(*answers)
        self._state.touched.difference_update(ranks)
        for answer in answers:
            good(answer)


def good(answer: Answer) -> None:
    if answer.failed:
        raise MPIError(C.ERR_RMA_RANGE, answer.data.decode(), rule="one-sided messages stay inside of the window")
