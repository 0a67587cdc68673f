"""Windows: memory that other ranks read and write without this rank's calling. On every transport, by active messages:
what is asked of a rank is done while it is in any call of MPI.
"""

from __future__ import annotations

from typing import Any, Self

from ..comm.message import Item
from . import constants as C
from .attributes import Attributes
from .buffers import BOTTOM, NOTHING, Spot, address_of, as_datatype, buffer, memory_of, simple
from .comm import COMM_SELF, Comm
from .datatype import Datatype
from .exception import MPIError
from .foreign import from_address
from .group import Group
from .handle import NAMED
from .info import INFO_NULL, Info
from .layout import Layout
from .op import NO_OP, REPLACE, SUM, Op, check_type
from .request import Pending, Request, done_already
from .state import WINDOW
from .window import (
    ACCUMULATE,
    COMPLETE,
    FLUSH,
    GET,
    LOCK,
    POST,
    PUT,
    SWAP,
    UNLOCK,
    Answer,
    Counter,
    Window,
    check_range,
    describe,
)  # fmt: skip


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
        self.units = self.comm.allgather(unit)

    def _stretch(self, offset: int, length: int) -> memoryview:
        where = f"rank {self.comm._state.rank}"
        if self.flavor != C.WIN_FLAVOR_DYNAMIC:
            return check_range(self.memory.data, offset, length, where)
        for start, memory in self.attached.items():
            if start <= offset and offset + length <= start + len(memory):
                return from_address(offset, length, memory)
        raise ValueError(f"{length} bytes at address {offset} are not attached on {where}")


class Win(Attributes, family=True):
    """Memory of each rank that the others may read and write."""

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
            C.WIN_BASE: state.memory.address, C.WIN_SIZE: state.memory.nbytes, C.WIN_DISP_UNIT: state.unit,
            C.WIN_CREATE_FLAVOR: state.flavor, C.WIN_MODEL: C.WIN_UNIFIED,
        }.get(keyval)  # fmt: skip

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

    # -- moving -----------------------------------------------------------------------------------------------------

    def _target(self, origin: Spot, rank: int, target: Any) -> tuple[int, list[tuple[int, int]], Spot]:
        """The target's number in the world, its blocks of bytes, and the origin."""
        state, to = self._state, self._rank(rank)
        disp, count, kind = (0, None, None) if target is None else (target, None, None)
        if isinstance(target, list | tuple) and 0 < len(target) < 4:
            disp, count, kind = (*target, None, None)[:3]
        if not hasattr(disp, "__index__"):
            raise ValueError(f"target {target!r}: a displacement, with a count and a datatype")
        datatype = origin.type if kind is None else as_datatype(kind)
        n = origin.count if count is None else count
        blocks = _blocks(disp * state.units[rank], n, datatype._layout)
        if sum(length for _, length in blocks) != origin.nbytes:
            raise MPIError(
                C.ERR_ARG, f"{origin.nbytes} bytes here and {sum(length for _, length in blocks)} there",
                rule="origin and target hold the same data",
            )  # fmt: skip
        state.touched.add(rank)
        return to, blocks, origin

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < len(self._state.members):
            raise MPIError(C.ERR_RANK, f"rank {rank}", rule=f"0 <= rank < {len(self._state.members)}, or PROC_NULL")
        return self._state.members[rank]

    def _accumulate(self, origin: Any, rank: int, target: Any, op: Op) -> None:
        spot = simple(origin, writable=False)
        check_type(op, spot)
        to, blocks, spot = self._target(spot, rank, target)
        alike = _name(spot)
        self._state.window.tell(to, ACCUMULATE, describe(blocks, op._state.name, alike) + bytes(spot.data()))

    def _fetch(self, spot: Spot, rank: int, target: Any, what: int, op: Op = NO_OP, data: bytes = b"") -> Pending:
        """A request whose answer is put into `spot`."""
        to, blocks, _ = self._target(spot, rank, target)
        head = describe(blocks, op._state.name, _name(spot), fetch=True)
        answer = self._state.window.ask(to, what, head + data, "an answer of")

        def finish() -> None:
            _good(answer)
            spot.fill(answer.data)

        return Pending(self._state.comm._state.matching, (answer,), finish)

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write into a rank's memory."""
        if target_rank != C.PROC_NULL:
            to, blocks, spot = self._target(simple(origin, writable=False), target_rank, target)
            self._state.window.tell(to, PUT, describe(blocks) + bytes(spot.data()))

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read from a rank's memory; it is here on return."""
        if target_rank != C.PROC_NULL:
            self._done(self._fetch(simple(origin, writable=True), target_rank, target, GET))

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Combine into a rank's memory, element by element, undivided."""
        if target_rank != C.PROC_NULL:
            self._accumulate(origin, target_rank, target, op)

    def Get_accumulate(self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """The same, and read what was there before."""
        self._done(self._get_accumulate(origin, result, target_rank, target, op))

    def _get_accumulate(self, origin: Any, result: Any, rank: int, target: Any, op: Op) -> Pending:
        if rank == C.PROC_NULL:
            return done_already()
        into = simple(result, writable=True)
        data = NOTHING if op == NO_OP and origin is None else simple(origin, writable=False)
        if op not in (NO_OP, REPLACE):
            check_type(op, data)
        return self._fetch(into, rank, target, ACCUMULATE, op, bytes(data.data()))

    def Fetch_and_op(self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM) -> None:
        """The same for one element."""
        data, into = simple(origin, writable=False), simple(result, writable=True)
        _single(data, into)
        if target_rank != C.PROC_NULL:
            self._done(self._fetch(into, target_rank, target_disp, ACCUMULATE, op, bytes(data.data())))

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """Write one element if the one there equals `compare`; read what was there before."""
        data, old = simple(origin, writable=False), simple(compare, writable=False)
        into = simple(result, writable=True)
        _single(data, old, into)
        if target_rank != C.PROC_NULL:
            both = bytes(old.data()) + bytes(data.data())
            self._done(self._fetch(into, target_rank, target_disp, SWAP, NO_OP, both))

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """A Put that can be waited for."""
        self.Put(origin, target_rank, target)
        return Request._of(self._flushed(target_rank))

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """A Get that can be waited for."""
        if target_rank == C.PROC_NULL:
            return Request._of(done_already())
        return Request._of(self._fetch(simple(origin, writable=True), target_rank, target, GET))

    def Raccumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> Request:
        """An Accumulate that can be waited for."""
        self.Accumulate(origin, target_rank, target, op)
        return Request._of(self._flushed(target_rank))

    def Rget_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> Request:
        """A Get_accumulate that can be waited for."""
        return Request._of(self._get_accumulate(origin, result, target_rank, target, op))

    # -- in step ----------------------------------------------------------------------------------------------------

    def _done(self, pending: Pending) -> None:
        Request._of(pending).Wait()

    def _await(self, *items: Item) -> None:
        self._state.comm._state.matching.wait(*items)

    def _flushed(self, rank: int) -> Pending:
        if rank == C.PROC_NULL:
            return done_already()
        answer = self._state.window.ask(self._rank(rank), FLUSH, b"", "for what was sent to")
        return Pending(self._state.comm._state.matching, (answer,), lambda: _good(answer))

    def _flush(self, ranks: Any) -> None:
        ranks = sorted(ranks)
        answers = [self._state.window.ask(self._rank(r), FLUSH, b"", "for what was sent to") for r in ranks]
        self._await(*answers)
        self._state.touched.difference_update(ranks)
        for answer in answers:
            _good(answer)

    def Fence(self, assertion: int = 0) -> None:
        """All ranks come; what was asked before is done on return."""
        self._flush(self._state.touched)
        self._state.comm.Barrier()

    def Lock(self, rank: int, lock_type: int = C.LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Have a rank's memory for oneself, or shared with others that share."""
        if lock_type not in (C.LOCK_EXCLUSIVE, C.LOCK_SHARED):
            raise MPIError(C.ERR_LOCKTYPE, f"lock type {lock_type}", rule="LOCK_EXCLUSIVE or LOCK_SHARED")
        if rank != C.PROC_NULL:
            alone = bytes([lock_type == C.LOCK_EXCLUSIVE])
            self._await(self._state.window.ask(self._rank(rank), LOCK, alone, "for the lock of"))

    def Unlock(self, rank: int) -> None:
        """Give it back; what was asked under the lock is done on return."""
        if rank != C.PROC_NULL:
            self._flush([rank])
            self._await(self._state.window.ask(self._rank(rank), UNLOCK, b"", "to give back the lock of"))

    def Lock_all(self, assertion: int = 0) -> None:
        """Share every rank's memory."""
        for rank in range(len(self._state.members)):
            self.Lock(rank, C.LOCK_SHARED)

    def Unlock_all(self) -> None:
        """Give all back."""
        for rank in range(len(self._state.members)):
            self.Unlock(rank)

    def Flush(self, rank: int) -> None:
        """What was asked of a rank is done on return."""
        if rank != C.PROC_NULL:
            self._flush([rank])

    Flush_local = Flush

    def Flush_all(self) -> None:
        """What was asked of all ranks is done on return."""
        self._flush(self._state.touched)

    Flush_local_all = Flush_all

    def Sync(self) -> None:
        """There is one copy of the memory: nothing to do."""
        _ = self._state

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Begin to ask of a group, when each of it has posted."""
        state = self._state
        posted = Counter(group._state.ranks, state.window.posted, "for Post of")
        self._await(posted)
        posted.take()
        state.access = list(posted.ranks)

    def Complete(self) -> None:
        """Enough asked."""
        state = self._state
        self._flush([state.members.index(r) for r in state.access])
        for rank in state.access:
            state.window.tell(rank, COMPLETE)
        state.access = []

    def Post(self, group: Group, assertion: int = 0) -> None:
        """Let a group ask."""
        state = self._state
        for rank in group._state.ranks:
            state.window.tell(rank, POST)
        state.exposure = Counter(group._state.ranks, state.window.completed, "for Complete of")

    def Wait(self) -> bool:
        """Return when the group has asked enough."""
        exposure = self._state.exposure
        if exposure is not None:
            self._await(exposure)
            self.Test()
        return True

    def Test(self) -> bool:
        """Whether the group has asked enough."""
        state = self._state
        state.comm._state.matching.poke()
        if state.exposure is not None:
            if not state.exposure.done:
                return False
            state.exposure.take()
            state.exposure = None
        return True


def _blocks(start: int, n: int, layout: Layout) -> list[tuple[int, int]]:
    if layout.dense:
        return [(start, n * layout.size)] if n else []
    return [(start + i * layout.extent + at, length) for i in range(n) for at, length in layout.blocks]


def _name(spot: Spot) -> str:
    """The number type that an operator works on."""
    for name, kind in NAMED.items():
        if isinstance(kind, Datatype) and kind and kind._layout.basic is spot.layout.alike:
            return name
    return "BYTE"


def _single(first: Spot, *others: Spot) -> None:
    for spot in (first, *others):
        if spot.count != 1 or spot.layout is not first.layout:
            raise ValueError(f"message: {spot.count} of {spot.type.Get_name()} where one element is meant")


def _good(answer: Answer) -> None:
    if answer.failed:
        raise MPIError(C.ERR_RMA_RANGE, answer.data.decode(), rule="one-sided messages stay inside of the window")


WIN_NULL = Win._constant("WIN_NULL")
