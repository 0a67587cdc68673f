"""Windows: memory that other ranks read and write without this rank's calling. On every transport, by active messages:
what is asked of a rank is done while it is in any call of MPI.
"""

from __future__ import annotations

from typing import Any

from . import constants as C
from .buffers import NOTHING, Spot, as_datatype, simple
from .datatype import Datatype
from .exception import MPIError
from .group import Group
from .handle import NAMED
from .layout import Layout
from .op import NO_OP, REPLACE, SUM, Op, check_type
from .request import Pending, Request, done_already
from .winbase import WindowHandle, good
from .window import ACCUMULATE, COMPLETE, GET, LOCK, POST, PUT, SWAP, UNLOCK, Counter, describe


class Win(WindowHandle, family=True):
    """Memory of each rank that the others may read and write."""

    __slots__ = ()

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
                C.ERR_ARG,
                f"{origin.nbytes} bytes here and {sum(length for _, length in blocks)} there",
                rule="origin and target hold the same data",
            )
        state.touched.add(rank)
        return to, blocks, origin

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
            good(answer)
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

    def Compare_and_swap(self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0) -> None:
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

    def Rget_accumulate(self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM) -> Request:
        """A Get_accumulate that can be waited for."""
        return Request._of(self._get_accumulate(origin, result, target_rank, target, op))

    # -- in step ----------------------------------------------------------------------------------------------------

    def _done(self, pending: Pending) -> None:
        Request._of(pending).Wait()

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


WIN_NULL = Win._constant("WIN_NULL")
