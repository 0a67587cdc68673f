"""Collectives of buffers, as programs call them: each at once, and with an I as a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .buffers import vector_w
from .op import SUM, Op
from .plans import Plans
from .request import Request


class Collectives(Plans):
    """The collectives of a communicator."""

    __slots__ = ()

    def Barrier(self) -> None:
        """Return when all ranks have come."""
        self._now(lambda channel: channel.comm.barrier())

    def Ibarrier(self) -> Request:
        """Done when all ranks have come."""
        return self._later(lambda channel: channel.comm.barrier())

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """The root's buffer, on all ranks."""
        self._now(self._bcast(buf, root))

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """Start a Bcast."""
        return self._later(self._bcast(buf, root))

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Every rank's buffer at the root, by rank."""
        self._now(self._gather(sendbuf, recvbuf, root))

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a Gather."""
        return self._later(self._gather(sendbuf, recvbuf, root))

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """The same with counts that differ by rank."""
        self._now(self._gatherv(sendbuf, recvbuf, root))

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a Gatherv."""
        return self._later(self._gatherv(sendbuf, recvbuf, root))

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """A block of the root's buffer for each rank."""
        self._now(self._scatter(sendbuf, recvbuf, root))

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a Scatter."""
        return self._later(self._scatter(sendbuf, recvbuf, root))

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """The same with counts that differ by rank."""
        self._now(self._scatterv(sendbuf, recvbuf, root))

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a Scatterv."""
        return self._later(self._scatterv(sendbuf, recvbuf, root))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Every rank's buffer on every rank, by rank."""
        self._now(self._allgather(sendbuf, recvbuf))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Allgather."""
        return self._later(self._allgather(sendbuf, recvbuf))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same with counts that differ by rank."""
        self._now(self._allgatherv(sendbuf, recvbuf))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Allgatherv."""
        return self._later(self._allgatherv(sendbuf, recvbuf))

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """A block from every rank for every rank."""
        self._now(self._alltoall(sendbuf, recvbuf))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Alltoall."""
        return self._later(self._alltoall(sendbuf, recvbuf))

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same with counts that differ by rank."""
        self._now(self._alltoallv(sendbuf, recvbuf))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Alltoallv."""
        return self._later(self._alltoallv(sendbuf, recvbuf))

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """The same with datatypes that differ by rank."""
        self._now(self._alltoallv(sendbuf, recvbuf, vector_w))

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an Alltoallw."""
        return self._later(self._alltoallv(sendbuf, recvbuf, vector_w))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """All ranks' buffers combined, at the root."""
        self._now(self._reduce(sendbuf, recvbuf, op, root))

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """Start a Reduce."""
        return self._later(self._reduce(sendbuf, recvbuf, op, root))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """All ranks' buffers combined, on all ranks."""
        self._now(self._allreduce(sendbuf, recvbuf, op))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start an Allreduce."""
        return self._later(self._allreduce(sendbuf, recvbuf, op))

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """All ranks' buffers combined, a block for each rank."""
        self._now(self._reduce_scatter_block(sendbuf, recvbuf, op))

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start a Reduce_scatter_block."""
        return self._later(self._reduce_scatter_block(sendbuf, recvbuf, op))

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM) -> None:
        """The same with blocks that differ by rank."""
        self._now(self._reduce_scatter(sendbuf, recvbuf, recvcounts, op))

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        """Start a Reduce_scatter."""
        return self._later(self._reduce_scatter(sendbuf, recvbuf, recvcounts, op))

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """The buffers of ranks 0 to this one combined."""
        self._now(self._scan(sendbuf, recvbuf, op))

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start a Scan."""
        return self._later(self._scan(sendbuf, recvbuf, op))

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """The buffers of the ranks before this one combined; nothing is said of rank 0."""
        self._now(self._scan(sendbuf, recvbuf, op, before=True))

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start an Exscan."""
        return self._later(self._scan(sendbuf, recvbuf, op, before=True))
