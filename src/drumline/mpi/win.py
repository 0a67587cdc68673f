"""Windows: memory that other ranks read and write one-sidedly, on every transport, by active messages.

Requests to a rank are executed while it is inside any MPI call.
"""

from __future__ import annotations

from typing import Any

from . import constants as C
from .buffers import NOTHING, MessageBuffer, as_datatype, parse_message
from .datatype import Datatype
from .exception import MPIError
from .group import Group
from .handles import PREDEFINED
from .op import NO_OP, REPLACE, SUM, Op, check_type
from .pending import PendingOperation, null_message
from .request import Request
from .type_layout import TypeLayout
from .win_base import WindowBase, check_reply
from .win_target import ACCUMULATE, COMPLETE, GET, LOCK, POST, PUT, SWAP, UNLOCK, RankCounter, request_head


class Win(WindowBase, family=True):
    """Memory of each rank that the others may read and write."""

    __slots__ = ()

    # -- data movement ------------------------------------------------------------------------------------------------

    def _target(
        self, origin: MessageBuffer, rank: int, target: Any
    ) -> tuple[int, list[tuple[int, int]], MessageBuffer]:
        """The target's world rank, its byte ranges, and the origin."""
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
                f"{origin.nbytes} bytes at the origin and {sum(length for _, length in blocks)} at the target",
                rule="origin and target have the same size",
            )
        state.touched.add(rank)
        return to, blocks, origin

    def _accumulate(self, origin: Any, rank: int, target: Any, op: Op) -> None:
        region = parse_message(origin, writable=False)
        check_type(op, region)
        to, blocks, region = self._target(region, rank, target)
        uniform_scalar = _name(region)
        self._state.window.notify(
            to, ACCUMULATE, request_head(blocks, op._state.name, uniform_scalar) + bytes(region.data())
        )

    def _fetch(
        self, region: MessageBuffer, rank: int, target: Any, what: int, op: Op = NO_OP, data: bytes = b""
    ) -> PendingOperation:
        """A request whose reply is written to `region`."""
        to, blocks, _ = self._target(region, rank, target)
        head = request_head(blocks, op._state.name, _name(region), fetch=True)
        reply = self._state.window.request(to, what, head + data, "for a reply of")

        def finish() -> None:
            check_reply(reply)
            region.fill(reply.data)

        return PendingOperation(self._state.comm._state.matcher, (reply,), finish)

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write to a rank's memory."""
        if target_rank != C.PROC_NULL:
            to, blocks, region = self._target(parse_message(origin, writable=False), target_rank, target)
            self._state.window.notify(to, PUT, request_head(blocks) + bytes(region.data()))

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read from a rank's memory; complete on return."""
        if target_rank != C.PROC_NULL:
            self._complete(self._fetch(parse_message(origin, writable=True), target_rank, target, GET))

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Reduce into a rank's memory, element by element, atomically."""
        if target_rank != C.PROC_NULL:
            self._accumulate(origin, target_rank, target, op)

    def Get_accumulate(self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Accumulate, and read the previous values."""
        self._complete(self._get_accumulate(origin, result, target_rank, target, op))

    def _get_accumulate(self, origin: Any, result: Any, rank: int, target: Any, op: Op) -> PendingOperation:
        if rank == C.PROC_NULL:
            return null_message()
        into = parse_message(result, writable=True)
        data = NOTHING if op == NO_OP and origin is None else parse_message(origin, writable=False)
        if op not in (NO_OP, REPLACE):
            check_type(op, data)
        return self._fetch(into, rank, target, ACCUMULATE, op, bytes(data.data()))

    def Fetch_and_op(self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM) -> None:
        """Get_accumulate for one element."""
        data, into = parse_message(origin, writable=False), parse_message(result, writable=True)
        _single(data, into)
        if target_rank != C.PROC_NULL:
            self._complete(self._fetch(into, target_rank, target_disp, ACCUMULATE, op, bytes(data.data())))

    def Compare_and_swap(self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0) -> None:
        """Write one element if the target's equals `compare`; read the previous value."""
        data, old = parse_message(origin, writable=False), parse_message(compare, writable=False)
        into = parse_message(result, writable=True)
        _single(data, old, into)
        if target_rank != C.PROC_NULL:
            both = bytes(old.data()) + bytes(data.data())
            self._complete(self._fetch(into, target_rank, target_disp, SWAP, NO_OP, both))

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """A Put with a request."""
        self.Put(origin, target_rank, target)
        return Request._of(self._flushed(target_rank))

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """A Get with a request."""
        if target_rank == C.PROC_NULL:
            return Request._of(null_message())
        return Request._of(self._fetch(parse_message(origin, writable=True), target_rank, target, GET))

    def Raccumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> Request:
        """An Accumulate with a request."""
        self.Accumulate(origin, target_rank, target, op)
        return Request._of(self._flushed(target_rank))

    def Rget_accumulate(self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM) -> Request:
        """A Get_accumulate with a request."""
        return Request._of(self._get_accumulate(origin, result, target_rank, target, op))

    # -- synchronisation ----------------------------------------------------------------------------------------------

    def _complete(self, pending: PendingOperation) -> None:
        Request._of(pending).Wait()

    def Fence(self, assertion: int = 0) -> None:
        """A barrier; earlier requests are complete on return."""
        self._flush(self._state.touched)
        self._state.comm.Barrier()

    def Lock(self, rank: int, lock_type: int = C.LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Lock a rank's memory, exclusively or shared."""
        if lock_type not in (C.LOCK_EXCLUSIVE, C.LOCK_SHARED):
            raise MPIError(C.ERR_LOCKTYPE, f"lock type {lock_type}", rule="LOCK_EXCLUSIVE or LOCK_SHARED")
        if rank != C.PROC_NULL:
            exclusive = bytes([lock_type == C.LOCK_EXCLUSIVE])
            self._await(self._state.window.request(self._rank(rank), LOCK, exclusive, "for the lock of"))

    def Unlock(self, rank: int) -> None:
        """Unlock a rank's memory; requests under the lock are complete on return."""
        if rank != C.PROC_NULL:
            self._flush([rank])
            self._await(self._state.window.request(self._rank(rank), UNLOCK, b"", "to release the lock of"))

    def Lock_all(self, assertion: int = 0) -> None:
        """Lock every rank's memory, shared."""
        for rank in range(len(self._state.members)):
            self.Lock(rank, C.LOCK_SHARED)

    def Unlock_all(self) -> None:
        """Unlock every rank's memory."""
        for rank in range(len(self._state.members)):
            self.Unlock(rank)

    def Flush(self, rank: int) -> None:
        """Complete all requests to a rank."""
        if rank != C.PROC_NULL:
            self._flush([rank])

    Flush_local = Flush

    def Flush_all(self) -> None:
        """Complete all requests."""
        self._flush(self._state.touched)

    Flush_local_all = Flush_all

    def Sync(self) -> None:
        """Do nothing: there is one copy of the memory."""
        _ = self._state

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Start an access epoch, when every rank of the group has called Post."""
        state = self._state
        posted = RankCounter(group._state.ranks, state.window.posted, "for Post of")
        self._await(posted)
        posted.take()
        state.access = list(posted.ranks)

    def Complete(self) -> None:
        """End the access epoch."""
        state = self._state
        self._flush([state.members.index(r) for r in state.access])
        for rank in state.access:
            state.window.notify(rank, COMPLETE)
        state.access = []

    def Post(self, group: Group, assertion: int = 0) -> None:
        """Start an exposure epoch for a group."""
        state = self._state
        for rank in group._state.ranks:
            state.window.notify(rank, POST)
        state.exposure = RankCounter(group._state.ranks, state.window.completed, "for Complete of")

    def Wait(self) -> bool:
        """Return when the group has called Complete."""
        exposure = self._state.exposure
        if exposure is not None:
            self._await(exposure)
            self.Test()
        return True

    def Test(self) -> bool:
        """Whether the group has called Complete."""
        state = self._state
        state.comm._state.matcher.make_progress()
        if state.exposure is not None:
            if not state.exposure.done:
                return False
            state.exposure.take()
            state.exposure = None
        return True


def _blocks(start: int, n: int, layout: TypeLayout) -> list[tuple[int, int]]:
    if layout.dense:
        return [(start, n * layout.size)] if n else []
    return [(start + i * layout.extent + at, length) for i in range(n) for at, length in layout.blocks]


def _name(region: MessageBuffer) -> str:
    """The name of the scalar type that an operator works on."""
    for name, kind in PREDEFINED.items():
        if isinstance(kind, Datatype) and kind and kind._layout.scalar is region.layout.uniform_scalar:
            return name
    return "BYTE"


def _single(first: MessageBuffer, *others: MessageBuffer) -> None:
    for region in (first, *others):
        if region.count != 1 or region.layout is not first.layout:
            raise ValueError(f"message: {region.count} of {region.type.Get_name()} where one element is expected")


WIN_NULL = Win._constant("WIN_NULL")
