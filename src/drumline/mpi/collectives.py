"""The collectives of a communicator: of buffers (blocking, and with an I as a request), and of Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import torch

from . import pickling
from .buffers import parse_vector_w
from .op import SUM, Op
from .prepared_reductions import PreparedReductions
from .request import Request


class Collectives(PreparedReductions):
    """The collectives of buffers."""

    __slots__ = ()

    def Barrier(self) -> None:
        """Return when all ranks have called it."""
        self._run_now(lambda channel: channel.comm.barrier())

    def Ibarrier(self) -> Request:
        """Start a Barrier."""
        return self._run_later(lambda channel: channel.comm.barrier())

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the root's buffer to all ranks."""
        self._run_now(self._bcast(buf, root))

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """Start a Bcast."""
        return self._run_later(self._bcast(buf, root))

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect every rank's buffer on the root, by rank."""
        self._run_now(self._gather(sendbuf, recvbuf, root))

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a Gather."""
        return self._run_later(self._gather(sendbuf, recvbuf, root))

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Gather with counts that differ by rank."""
        self._run_now(self._gatherv(sendbuf, recvbuf, root))

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a Gatherv."""
        return self._run_later(self._gatherv(sendbuf, recvbuf, root))

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Distribute the root's buffer, one block per rank."""
        self._run_now(self._scatter(sendbuf, recvbuf, root))

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a Scatter."""
        return self._run_later(self._scatter(sendbuf, recvbuf, root))

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Scatter with counts that differ by rank."""
        self._run_now(self._scatterv(sendbuf, recvbuf, root))

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a Scatterv."""
        return self._run_later(self._scatterv(sendbuf, recvbuf, root))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect every rank's buffer on every rank, by rank."""
        self._run_now(self._allgather(sendbuf, recvbuf))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Allgather."""
        return self._run_later(self._allgather(sendbuf, recvbuf))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Allgather with counts that differ by rank."""
        self._run_now(self._allgatherv(sendbuf, recvbuf))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Allgatherv."""
        return self._run_later(self._allgatherv(sendbuf, recvbuf))

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a block from every rank to every rank."""
        self._run_now(self._alltoall(sendbuf, recvbuf))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Alltoall."""
        return self._run_later(self._alltoall(sendbuf, recvbuf))

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Alltoall with counts that differ by rank."""
        self._run_now(self._alltoallv(sendbuf, recvbuf))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Alltoallv."""
        return self._run_later(self._alltoallv(sendbuf, recvbuf))

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Alltoallv with datatypes that differ by rank."""
        self._run_now(self._alltoallv(sendbuf, recvbuf, parse_vector_w))

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Alltoallw."""
        return self._run_later(self._alltoallv(sendbuf, recvbuf, parse_vector_w))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Reduce all ranks' buffers, on the root."""
        self._run_now(self._reduce(sendbuf, recvbuf, op, root))

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """Start a Reduce."""
        return self._run_later(self._reduce(sendbuf, recvbuf, op, root))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce all ranks' buffers, on all ranks."""
        self._run_now(self._allreduce(sendbuf, recvbuf, op))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start an Allreduce."""
        return self._run_later(self._allreduce(sendbuf, recvbuf, op))

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce all ranks' buffers; each rank gets one block."""
        self._run_now(self._reduce_scatter_block(sendbuf, recvbuf, op))

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start a Reduce_scatter_block."""
        return self._run_later(self._reduce_scatter_block(sendbuf, recvbuf, op))

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM) -> None:
        """Reduce_scatter_block with block sizes that differ by rank."""
        self._run_now(self._reduce_scatter(sendbuf, recvbuf, recvcounts, op))

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        """Start a Reduce_scatter."""
        return self._run_later(self._reduce_scatter(sendbuf, recvbuf, recvcounts, op))

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce the buffers of ranks 0 to this one."""
        self._run_now(self._scan(sendbuf, recvbuf, op))

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start a Scan."""
        return self._run_later(self._scan(sendbuf, recvbuf, op))

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce the buffers of the ranks before this one; undefined on rank 0."""
        self._run_now(self._scan(sendbuf, recvbuf, op, before=True))

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start an Exscan."""
        return self._run_later(self._scan(sendbuf, recvbuf, op, before=True))


_GATHER, _SCATTER, _ALLGATHER, _ALLTOALL, _SCAN, _EXSCAN = range(16, 22)
"""Tags: ranks that call different collectives do not receive each other's objects."""
ObjectFunction = Callable[[Any, Any], Any]


def _dumps(obj: Any) -> bytes:
    return pickling.default.dumps(obj)


class ObjectCollectives(Collectives):
    """The lower-case collectives: objects are pickled, and reduced by Python functions in rank order."""

    __slots__ = ()

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Copy the root's object to all ranks."""
        mine, channel = self._root(root), self._state.blocking
        with self._state.lock("bcast"):
            data = _dumps(obj) if mine else b""
            size = channel.comm.broadcast(torch.tensor([len(data)]), root=root)
            memory = bytearray(data) if mine else bytearray(int(size))
            channel.comm.broadcast(torch.frombuffer(memory, dtype=torch.uint8), root=root)
        return pickling.default.loads(memory)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Every rank's object on the root, by rank; None elsewhere."""
        mine, state = self._root(root), self._state
        with state.lock("gather"):
            parts = state.blocking.exchange_bytes(_GATHER, {root: _dumps(sendobj)}, range(state.size) if mine else ())
        return [pickling.default.loads(parts[r]) for r in range(state.size)] if mine else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """One of the root's objects on each rank."""
        mine, state = self._root(root), self._state
        sends = dict(enumerate(map(_dumps, self._each(sendobj)))) if mine else {}
        with state.lock("scatter"):
            return pickling.default.loads(state.blocking.exchange_bytes(_SCATTER, sends, [root])[root])

    def allgather(self, sendobj: Any) -> list[Any]:
        """Every rank's object on every rank, by rank."""
        state = self._state
        with state.lock("allgather"):
            data = dict.fromkeys(range(state.size), _dumps(sendobj))
            parts = state.blocking.exchange_bytes(_ALLGATHER, data, range(state.size))
        return [pickling.default.loads(parts[r]) for r in range(state.size)]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send an object from every rank to every rank."""
        state = self._state
        with state.lock("alltoall"):
            data = dict(enumerate(map(_dumps, self._each(sendobj))))
            parts = state.blocking.exchange_bytes(_ALLTOALL, data, range(state.size))
        return [pickling.default.loads(parts[r]) for r in range(state.size)]

    def reduce(self, sendobj: Any, op: ObjectFunction = SUM, root: int = 0) -> Any:
        """Reduce all ranks' objects on the root; None elsewhere."""
        objects = self.gather(sendobj, root)
        return None if objects is None else fold(op, objects)

    def allreduce(self, sendobj: Any, op: ObjectFunction = SUM) -> Any:
        """Reduce all ranks' objects on all ranks."""
        return self.bcast(self.reduce(sendobj, op, 0), 0)

    def scan(self, sendobj: Any, op: ObjectFunction = SUM) -> Any:
        """Reduce the objects of ranks 0 to this one."""
        before = self._chain(sendobj, op, _SCAN)
        return sendobj if before is None else op(before[0], sendobj)

    def exscan(self, sendobj: Any, op: ObjectFunction = SUM) -> Any:
        """Reduce the objects of the ranks before this one; None on rank 0."""
        before = self._chain(sendobj, op, _EXSCAN)
        return None if before is None else before[0]

    def _chain(self, sendobj: Any, op: ObjectFunction, tag: int) -> tuple[Any] | None:
        """The reduction over the ranks before this one, passed from rank to rank."""
        state = self._state
        channel, rank = state.blocking, state.rank
        with state.lock("scan"):
            before = None
            if rank > 0:
                before = (pickling.default.loads(channel.exchange_bytes(tag, {}, [rank - 1])[rank - 1]),)
            if rank + 1 < state.size:
                # op may change its operands, so reduce a copy
                mine = sendobj if before is None else op(pickling.default.loads(_dumps(before[0])), sendobj)
                channel.exchange_bytes(tag, {rank + 1: _dumps(mine)}, ())
        return before

    def _each(self, objects: Sequence[Any] | None) -> list[Any]:
        size = self._state.size
        items = [] if objects is None else list(objects)
        if len(items) != size:
            raise ValueError(f"{len(items)} objects for {size} ranks")
        return items
