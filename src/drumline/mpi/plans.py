"""Collectives of buffers as plans: read from the arguments at once, run now or on the worker thread.

Algorithms are not here: a plan turns buffers into tensors and hands them to the communicator, which runs schedules.
What varies in size by rank goes by plain messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import constants as C
from .buffers import Spot, in_place, simple, vector
from .exception import MPIError
from .op import Op, plan
from .p2p import PointToPoint
from .request import Pending, Request
from .state import Channel
from .tensors import given, raw, taken

Run = Callable[[Channel], None]
_GATHERV, _SCATTERV, _ALLGATHERV, _ALLTOALLV, _ALLTOALLW = range(1, 6)


class Plans(PointToPoint):
    """What a communicator does in each collective."""

    __slots__ = ()

    def _now(self, run: Run) -> None:
        run(self._state.now)

    def _later(self, run: Run) -> Request:
        state = self._state
        job = state.worker.submit(run)
        return Request._of(Pending(state.matching, (job,), job.result, wait=lambda: job.wait(state.matching)))

    def _root(self, root: int) -> bool:
        """Whether this rank is the root, which must exist."""
        size = self._state.size
        if not 0 <= root < size:
            raise MPIError(C.ERR_ROOT, f"root {root}", rule=f"0 <= root < {size}")
        return root == self._state.rank

    def _blocks(self, message: Any, *, writable: bool) -> tuple[Spot, int]:
        """A buffer with a block for each rank, and the elements of one block."""
        spot = simple(message, writable=writable, blocks=self._state.size)
        return Spot(spot.memory, spot.base, spot.count * self._state.size, spot.type, spot.device), spot.count

    # -- data that moves --------------------------------------------------------------------------------------------

    def _bcast(self, buf: Any, root: int) -> Run:
        mine = self._root(root)
        spot = simple(buf, writable=not mine)

        def run(channel: Channel) -> None:
            tensor, done = (given(spot), _nothing) if mine else taken(spot)
            channel.comm.broadcast(tensor, root=root)
            done()

        return run

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int) -> Run:
        rank, size = self._state.rank, self._state.size
        whole = None
        if self._root(root):
            whole, n = self._blocks(recvbuf, writable=True)
            source = whole.part(rank * n, n) if in_place(sendbuf) else simple(sendbuf, writable=False)
            _same(source.nbytes * size, whole.nbytes)
        else:
            source = simple(sendbuf, writable=False)

        def run(channel: Channel) -> None:
            if whole is None:
                channel.comm.gather(given(source), root=root)
                return
            out, done = taken(whole)
            channel.comm.gather(given(source).clone(), root=root, out=out.view(size, -1))
            done()

        return run

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int) -> Run:
        rank, size = self._state.rank, self._state.size
        whole = None
        if self._root(root):
            whole, n = self._blocks(sendbuf, writable=False)
            target = None if in_place(recvbuf) else simple(recvbuf, writable=True)
            _same(n * size * whole.layout.size, whole.nbytes if target is None else target.nbytes * size)
        else:
            target = simple(recvbuf, writable=True)

        def run(channel: Channel) -> None:
            rows = None if whole is None else given(whole).view(size, -1)
            if target is None:
                assert rows is not None
                channel.comm.scatter(rows, root=root, out=rows[rank].clone())
                return
            out, done = taken(target)
            channel.comm.scatter(rows, root=root, out=out)
            done()

        return run

    def _allgather(self, sendbuf: Any, recvbuf: Any) -> Run:
        rank, size = self._state.rank, self._state.size
        whole, n = self._blocks(recvbuf, writable=True)
        source = whole.part(rank * n, n) if in_place(sendbuf) else simple(sendbuf, writable=False)
        _same(source.nbytes * size, whole.nbytes)

        def run(channel: Channel) -> None:
            out, done = taken(whole)
            channel.comm.all_gather(given(source).clone(), out=out.view(size, -1))
            done()

        return run

    def _alltoall(self, sendbuf: Any, recvbuf: Any) -> Run:
        size = self._state.size
        whole, _ = self._blocks(recvbuf, writable=True)
        source = whole if in_place(sendbuf) else self._blocks(sendbuf, writable=False)[0]
        _same(source.nbytes, whole.nbytes)

        def run(channel: Channel) -> None:
            out, done = taken(whole)
            rows = given(source).view(size, -1)
            channel.comm.all_to_all(rows.clone() if source is whole else rows, out=out.view(size, -1))
            done()

        return run

    # -- data that varies by rank -----------------------------------------------------------------------------------

    def _gatherv(self, sendbuf: Any, recvbuf: Any, root: int) -> Run:
        rank, size = self._state.rank, self._state.size
        if not self._root(root):
            data = simple(sendbuf, writable=False)
            return lambda channel: channel.exchange(_GATHERV, {root: data.data()}, {})
        spots = vector(recvbuf, size, writable=True)
        source = spots[rank] if in_place(sendbuf) else simple(sendbuf, writable=False)

        def run(channel: Channel) -> None:
            channel.exchange(_GATHERV, {rank: memoryview(bytes(source.data()))}, dict(enumerate(spots)))

        return run

    def _scatterv(self, sendbuf: Any, recvbuf: Any, root: int) -> Run:
        rank, size = self._state.rank, self._state.size
        if not self._root(root):
            spot = simple(recvbuf, writable=True)
            return lambda channel: channel.exchange(_SCATTERV, {}, {root: spot})
        spots = vector(sendbuf, size, writable=False)
        target = {} if in_place(recvbuf) else {rank: simple(recvbuf, writable=True)}

        def run(channel: Channel) -> None:
            channel.exchange(_SCATTERV, {r: spot.data() for r, spot in enumerate(spots)}, target)

        return run

    def _allgatherv(self, sendbuf: Any, recvbuf: Any) -> Run:
        rank, size = self._state.rank, self._state.size
        spots = vector(recvbuf, size, writable=True)
        source = spots[rank] if in_place(sendbuf) else simple(sendbuf, writable=False)

        def run(channel: Channel) -> None:
            data = memoryview(bytes(source.data()))
            channel.exchange(_ALLGATHERV, dict.fromkeys(range(size), data), dict(enumerate(spots)))

        return run

    def _alltoallv(self, sendbuf: Any, recvbuf: Any, read: Callable[..., list[Spot]] = vector) -> Run:
        size = self._state.size
        spots = read(recvbuf, size, writable=True)
        sources = spots if in_place(sendbuf) else read(sendbuf, size, writable=False)
        tag = _ALLTOALLV if read is vector else _ALLTOALLW

        def run(channel: Channel) -> None:
            data = {r: s.data() if sources is not spots else memoryview(bytes(s.data())) for r, s in enumerate(sources)}
            channel.exchange(tag, data, dict(enumerate(spots)))

        return run

    # -- reductions -------------------------------------------------------------------------------------------------

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: Op, root: int) -> Run:
        target = simple(recvbuf, writable=True) if self._root(root) else None
        source = target if target is not None and in_place(sendbuf) else simple(sendbuf, writable=False)
        if target is not None:
            _alike(source, target)
        dtype, how = plan(op, source)

        def run(channel: Channel) -> None:
            out = None if target is None else raw(target, dtype)
            tensor = raw(source, dtype)
            channel.comm.reduce(tensor.clone() if source is target else tensor, op=how, root=root, out=out)
            if target is not None:
                target.flush()

        return run

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Op) -> Run:
        target = simple(recvbuf, writable=True)
        source = target if in_place(sendbuf) else simple(sendbuf, writable=False)
        _alike(source, target)
        dtype, how = plan(op, target)

        def run(channel: Channel) -> None:
            tensor = raw(target, dtype)
            if source is not target:
                tensor.copy_(raw(source, dtype))
            channel.comm.all_reduce(tensor, op=how)
            target.flush()

        return run

    def _reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op) -> Run:
        size = self._state.size
        if in_place(sendbuf):
            source, n = self._blocks(recvbuf, writable=True)
            target = source.part(0, n)
        else:
            source, n = self._blocks(sendbuf, writable=False)
            target = simple(recvbuf, writable=True)
            _alike(source.part(0, n), target)
        dtype, how = plan(op, source)

        def run(channel: Channel) -> None:
            rows = raw(source, dtype).view(size, -1)
            channel.comm.reduce_scatter(rows.clone() if in_place(sendbuf) else rows, op=how, out=raw(target, dtype))
            target.flush()

        return run

    def _reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None, op: Op) -> Run:
        state = self._state
        target = simple(recvbuf, writable=True)
        inside = in_place(sendbuf)
        source = target if inside else simple(sendbuf, writable=False)
        if source.layout is not target.layout or (recvcounts is not None and target.count < recvcounts[state.rank]):
            raise ValueError("message: what is sent and what is received are not alike")
        if recvcounts is not None and (len(recvcounts) != state.size or sum(recvcounts) != source.count):
            raise ValueError(f"message: {source.count} elements for {state.size} ranks in counts {list(recvcounts)}")
        if recvcounts is None and inside:
            raise ValueError("message: in place, the counts must be given")
        dtype, how = plan(op, source)

        def run(channel: Channel) -> None:
            counts = recvcounts
            if counts is None:
                counts = channel.comm.all_gather(torch.tensor([target.count])).view(-1).tolist()
            before, n = sum(counts[: state.rank]), counts[state.rank]
            # Shares may differ in size: the whole is reduced everywhere, and each rank keeps its own.
            tensor = channel.comm.all_reduce(raw(source, dtype).clone(), op=how)
            whole = Spot(memoryview(bytearray(_bytes(tensor))), 0, source.count, source.type, None)
            target.part(0, n).memory[target.base : target.base + n * target.layout.extent] = whole.part(before, n).raw()
            target.flush()

        return run

    def _scan(self, sendbuf: Any, recvbuf: Any, op: Op, *, before: bool = False) -> Run:
        target = simple(recvbuf, writable=True)
        source = target if in_place(sendbuf) else simple(sendbuf, writable=False)
        _alike(source, target)
        dtype, how = plan(op, target)

        def run(channel: Channel) -> None:
            tensor = raw(source, dtype)
            scan = channel.comm.exscan if before else channel.comm.scan
            first = before and channel.rank == 0  # of whom the standard promises nothing
            out = torch.empty_like(tensor) if first else raw(target, dtype)
            scan(tensor.clone() if source is target else tensor, op=how, out=out)
            target.flush()

        return run


def _nothing() -> None:
    """Nothing is left to do."""


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _same(gives: int, gets: int) -> None:
    if gives != gets:
        raise MPIError(
            C.ERR_TRUNCATE,
            f"{gives} bytes are given where {gets} are expected",
            rule="in a collective, what is sent and what is received are of one size",
        )


def _alike(source: Spot, target: Spot) -> None:
    if source.count != target.count or source.layout is not target.layout:
        a, b = (f"{s.count} of {s.type.Get_name() or 'a made datatype'}" for s in (source, target))
        raise ValueError(f"message: {a} are given where {b} are expected")
