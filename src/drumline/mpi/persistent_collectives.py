"""Persistent collectives: made once by all ranks in one order, and started repeatedly, in any order.

Ranks may start two persistent collectives in different orders, so each has a context and, from its first start, a
thread of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .buffers import parse_vector_w
from .info import INFO_NULL, Info
from .op import SUM, Op
from .pending import PendingOperation
from .persistent_request import Prequest
from .prepared_collectives import PreparedRun
from .prepared_reductions import PreparedReductions


class PersistentCollectives(PreparedReductions):
    """The persistent collectives of a communicator."""

    __slots__ = ()

    def _persistent(self, prepare: Callable[..., PreparedRun], *args: Any) -> Prequest:
        """A request that prepares and runs a collective at each start. Arguments are checked here; the buffers are
        read again at each start, because memory of a GPU is copied when it is read."""
        kept = [list(a) if isinstance(a, list) else a for a in args]  # later changes of a message have no effect
        prepare(*kept)
        parent = self._state
        state = parent.child(parent.name, parent.members, "persistent")

        def start() -> PendingOperation:
            task = state.worker.submit(prepare(*kept))
            return PendingOperation(state.matcher, (task,), task.result, wait=lambda: task.wait(state.matcher))

        pending = PendingOperation(state.matcher, (), start=start)
        weakref.finalize(pending, state.free).atexit = False  # the thread ends with its request
        return Prequest._of(pending)

    def Barrier_init(self, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Barrier."""
        return self._persistent(lambda: lambda channel: channel.comm.barrier())

    def Bcast_init(self, buf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Bcast."""
        return self._persistent(self._bcast, buf, root)

    def Gather_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Gather."""
        return self._persistent(self._gather, sendbuf, recvbuf, root)

    def Gatherv_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Gatherv."""
        return self._persistent(self._gatherv, sendbuf, recvbuf, root)

    def Scatter_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Scatter."""
        return self._persistent(self._scatter, sendbuf, recvbuf, root)

    def Scatterv_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Scatterv."""
        return self._persistent(self._scatterv, sendbuf, recvbuf, root)

    def Allgather_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Allgather."""
        return self._persistent(self._allgather, sendbuf, recvbuf)

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Allgatherv."""
        return self._persistent(self._allgatherv, sendbuf, recvbuf)

    def Alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Alltoall."""
        return self._persistent(self._alltoall, sendbuf, recvbuf)

    def Alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Alltoallv."""
        return self._persistent(self._alltoallv, sendbuf, recvbuf)

    def Alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Alltoallw."""
        return self._persistent(self._alltoallv, sendbuf, recvbuf, parse_vector_w)

    def Reduce_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Reduce."""
        return self._persistent(self._reduce, sendbuf, recvbuf, op, root)

    def Allreduce_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Allreduce."""
        return self._persistent(self._allreduce, sendbuf, recvbuf, op)

    def Reduce_scatter_block_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Reduce_scatter_block."""
        return self._persistent(self._reduce_scatter_block, sendbuf, recvbuf, op)

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Op = SUM,
        info: Info = INFO_NULL,
    ) -> Prequest:
        """Make a persistent Reduce_scatter."""
        return self._persistent(self._reduce_scatter, sendbuf, recvbuf, recvcounts, op)

    def Scan_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Scan."""
        return self._persistent(self._scan, sendbuf, recvbuf, op)

    def Exscan_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Exscan."""
        return self._persistent(lambda *a: self._scan(*a, before=True), sendbuf, recvbuf, op)
