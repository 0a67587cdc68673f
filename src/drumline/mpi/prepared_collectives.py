"""Collectives that move buffers: arguments are parsed at the call, and the returned function runs now or on a thread.

The algorithms are elsewhere: buffers become tensors, and the communicator runs its schedules on them. Data whose size
varies by rank is exchanged by plain messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import constants as C
from .buffers import MessageBuffer, in_place, parse_message, parse_vector
from .exception import MPIError
from .message_tensors import input_tensor, output_tensor
from .object_messages import ObjectMessages
from .pending import PendingOperation
from .request import Request
from .state import CollectiveChannel

PreparedRun = Callable[[CollectiveChannel], None]
"""A collective with parsed arguments."""
_GATHERV, _SCATTERV, _ALLGATHERV, _ALLTOALLV, _ALLTOALLW = range(1, 6)


class PreparedCollectives(ObjectMessages):
    """Prepares the collectives of a communicator that only move data."""

    __slots__ = ()

    def _run_now(self, run: PreparedRun) -> None:
        run(self._state.blocking)

    def _run_later(self, run: PreparedRun) -> Request:
        state = self._state
        task = state.worker.submit(run)
        return Request._of(PendingOperation(state.matcher, (task,), task.result, wait=lambda: task.wait(state.matcher)))

    def _root(self, root: int) -> bool:
        """Whether this rank is the root; refuses a root that does not exist."""
        size = self._state.size
        if not 0 <= root < size:
            raise MPIError(C.ERR_ROOT, f"root {root}", rule=f"0 <= root < {size}")
        return root == self._state.rank

    def _blocks(self, message: Any, *, writable: bool) -> tuple[MessageBuffer, int]:
        """A buffer with a block for each rank, and the number of elements of one block."""
        region = parse_message(message, writable=writable, blocks=self._state.size)
        return MessageBuffer(
            region.memory, region.base, region.count * self._state.size, region.type, region.device
        ), region.count

    # -- equal sizes --------------------------------------------------------------------------------------------------

    def _bcast(self, buf: Any, root: int) -> PreparedRun:
        mine = self._root(root)
        region = parse_message(buf, writable=not mine)

        def run(channel: CollectiveChannel) -> None:
            tensor, done = (input_tensor(region), _nothing) if mine else output_tensor(region)
            channel.comm.broadcast(tensor, root=root)
            done()

        return run

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int) -> PreparedRun:
        rank, size = self._state.rank, self._state.size
        whole = None
        if self._root(root):
            whole, n = self._blocks(recvbuf, writable=True)
            source = whole.part(rank * n, n) if in_place(sendbuf) else parse_message(sendbuf, writable=False)
            _check_sizes(source.nbytes * size, whole.nbytes)
        else:
            source = parse_message(sendbuf, writable=False)

        def run(channel: CollectiveChannel) -> None:
            if whole is None:
                channel.comm.gather(input_tensor(source), root=root)
                return
            out, done = output_tensor(whole)
            channel.comm.gather(input_tensor(source).clone(), root=root, out=out.view(size, -1))
            done()

        return run

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int) -> PreparedRun:
        rank, size = self._state.rank, self._state.size
        whole = None
        if self._root(root):
            whole, n = self._blocks(sendbuf, writable=False)
            target = None if in_place(recvbuf) else parse_message(recvbuf, writable=True)
            _check_sizes(n * size * whole.layout.size, whole.nbytes if target is None else target.nbytes * size)
        else:
            target = parse_message(recvbuf, writable=True)

        def run(channel: CollectiveChannel) -> None:
            rows = None if whole is None else input_tensor(whole).view(size, -1)
            if target is None:
                assert rows is not None
                channel.comm.scatter(rows, root=root, out=rows[rank].clone())
                return
            out, done = output_tensor(target)
            channel.comm.scatter(rows, root=root, out=out)
            done()

        return run

    def _allgather(self, sendbuf: Any, recvbuf: Any) -> PreparedRun:
        rank, size = self._state.rank, self._state.size
        whole, n = self._blocks(recvbuf, writable=True)
        source = whole.part(rank * n, n) if in_place(sendbuf) else parse_message(sendbuf, writable=False)
        _check_sizes(source.nbytes * size, whole.nbytes)

        def run(channel: CollectiveChannel) -> None:
            out, done = output_tensor(whole)
            channel.comm.all_gather(input_tensor(source).clone(), out=out.view(size, -1))
            done()

        return run

    def _alltoall(self, sendbuf: Any, recvbuf: Any) -> PreparedRun:
        size = self._state.size
        whole, _ = self._blocks(recvbuf, writable=True)
        source = whole if in_place(sendbuf) else self._blocks(sendbuf, writable=False)[0]
        _check_sizes(source.nbytes, whole.nbytes)

        def run(channel: CollectiveChannel) -> None:
            out, done = output_tensor(whole)
            rows = input_tensor(source).view(size, -1)
            channel.comm.all_to_all(rows.clone() if source is whole else rows, out=out.view(size, -1))
            done()

        return run

    # -- sizes that vary by rank --------------------------------------------------------------------------------------

    def _gatherv(self, sendbuf: Any, recvbuf: Any, root: int) -> PreparedRun:
        rank, size = self._state.rank, self._state.size
        if not self._root(root):
            data = parse_message(sendbuf, writable=False)
            return lambda channel: channel.exchange(_GATHERV, {root: data.data()}, {})
        regions = parse_vector(recvbuf, size, writable=True)
        source = regions[rank] if in_place(sendbuf) else parse_message(sendbuf, writable=False)

        def run(channel: CollectiveChannel) -> None:
            channel.exchange(_GATHERV, {rank: memoryview(bytes(source.data()))}, dict(enumerate(regions)))

        return run

    def _scatterv(self, sendbuf: Any, recvbuf: Any, root: int) -> PreparedRun:
        rank, size = self._state.rank, self._state.size
        if not self._root(root):
            region = parse_message(recvbuf, writable=True)
            return lambda channel: channel.exchange(_SCATTERV, {}, {root: region})
        regions = parse_vector(sendbuf, size, writable=False)
        target = {} if in_place(recvbuf) else {rank: parse_message(recvbuf, writable=True)}

        def run(channel: CollectiveChannel) -> None:
            channel.exchange(_SCATTERV, {r: region.data() for r, region in enumerate(regions)}, target)

        return run

    def _allgatherv(self, sendbuf: Any, recvbuf: Any) -> PreparedRun:
        rank, size = self._state.rank, self._state.size
        regions = parse_vector(recvbuf, size, writable=True)
        source = regions[rank] if in_place(sendbuf) else parse_message(sendbuf, writable=False)

        def run(channel: CollectiveChannel) -> None:
            data = memoryview(bytes(source.data()))
            channel.exchange(_ALLGATHERV, dict.fromkeys(range(size), data), dict(enumerate(regions)))

        return run

    def _alltoallv(
        self, sendbuf: Any, recvbuf: Any, read: Callable[..., list[MessageBuffer]] = parse_vector
    ) -> PreparedRun:
        size = self._state.size
        regions = read(recvbuf, size, writable=True)
        sources = regions if in_place(sendbuf) else read(sendbuf, size, writable=False)
        tag = _ALLTOALLV if read is parse_vector else _ALLTOALLW

        def run(channel: CollectiveChannel) -> None:
            data = {
                r: s.data() if sources is not regions else memoryview(bytes(s.data())) for r, s in enumerate(sources)
            }
            channel.exchange(tag, data, dict(enumerate(regions)))

        return run


def _nothing() -> None:
    """Do nothing."""


def _check_sizes(sent: int, expected: int) -> None:
    if sent != expected:
        raise MPIError(
            C.ERR_TRUNCATE,
            f"{sent} bytes are sent where {expected} are expected",
            rule="in a collective, sent and received data have the same size",
        )
