"""Collectives of buffers: arguments are parsed at the call, and the returned function runs now or on the worker thread.

The algorithms are elsewhere: buffers become tensors, and the communicator runs its schedules on them. Data whose size
varies by rank is exchanged by plain messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import constants as C
from .buffers import MessageBuffer, in_place, input_tensor, output_tensor, parse_message, parse_vector, raw_tensor
from .exception import MPIError
from .op import Op, tensor_operator
from .pending import PendingOperation
from .point_to_point import PointToPoint
from .request import Request
from .state import CollectiveChannel

PreparedRun = Callable[[CollectiveChannel], None]
"""A collective with parsed arguments."""
_GATHERV, _SCATTERV, _ALLGATHERV, _ALLTOALLV, _ALLTOALLW = range(1, 6)


class PreparedCollectives(PointToPoint):
    """Prepares each collective of a communicator."""

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

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: Op, root: int) -> PreparedRun:
        target = parse_message(recvbuf, writable=True) if self._root(root) else None
        source = target if target is not None and in_place(sendbuf) else parse_message(sendbuf, writable=False)
        if target is not None:
            _check_match(source, target)
        dtype, how = tensor_operator(op, source)

        def run(channel: CollectiveChannel) -> None:
            out = None if target is None else raw_tensor(target, dtype)
            tensor = raw_tensor(source, dtype)
            channel.comm.reduce(tensor.clone() if source is target else tensor, op=how, root=root, out=out)
            if target is not None:
                target.flush()

        return run

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Op) -> PreparedRun:
        target = parse_message(recvbuf, writable=True)
        source = target if in_place(sendbuf) else parse_message(sendbuf, writable=False)
        _check_match(source, target)
        dtype, how = tensor_operator(op, target)

        def run(channel: CollectiveChannel) -> None:
            tensor = raw_tensor(target, dtype)
            if source is not target:
                tensor.copy_(raw_tensor(source, dtype))
            channel.comm.all_reduce(tensor, op=how)
            target.flush()

        return run

    def _reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op) -> PreparedRun:
        size = self._state.size
        if in_place(sendbuf):
            source, n = self._blocks(recvbuf, writable=True)
            target = source.part(0, n)
        else:
            source, n = self._blocks(sendbuf, writable=False)
            target = parse_message(recvbuf, writable=True)
            _check_match(source.part(0, n), target)
        dtype, how = tensor_operator(op, source)

        def run(channel: CollectiveChannel) -> None:
            rows = raw_tensor(source, dtype).view(size, -1)
            channel.comm.reduce_scatter(
                rows.clone() if in_place(sendbuf) else rows, op=how, out=raw_tensor(target, dtype)
            )
            target.flush()

        return run

    def _reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None, op: Op) -> PreparedRun:
        state = self._state
        target = parse_message(recvbuf, writable=True)
        inside = in_place(sendbuf)
        source = target if inside else parse_message(sendbuf, writable=False)
        if source.layout is not target.layout or (recvcounts is not None and target.count < recvcounts[state.rank]):
            raise ValueError("message: send and receive buffers do not match")
        if recvcounts is not None and (len(recvcounts) != state.size or sum(recvcounts) != source.count):
            raise ValueError(f"message: {source.count} elements for {state.size} ranks in counts {list(recvcounts)}")
        if recvcounts is None and inside:
            raise ValueError("message: in place, the counts must be given")
        dtype, how = tensor_operator(op, source)

        def run(channel: CollectiveChannel) -> None:
            counts = recvcounts
            if counts is None:
                counts = channel.comm.all_gather(torch.tensor([target.count])).view(-1).tolist()
            before, n = sum(counts[: state.rank]), counts[state.rank]
            # Shares may differ in size: reduce the whole everywhere, and keep this rank's.
            tensor = channel.comm.all_reduce(raw_tensor(source, dtype).clone(), op=how)
            whole = MessageBuffer(memoryview(bytearray(_bytes(tensor))), 0, source.count, source.type, None)
            target.part(0, n).memory[target.base : target.base + n * target.layout.extent] = whole.part(before, n).raw()
            target.flush()

        return run

    def _scan(self, sendbuf: Any, recvbuf: Any, op: Op, *, before: bool = False) -> PreparedRun:
        target = parse_message(recvbuf, writable=True)
        source = target if in_place(sendbuf) else parse_message(sendbuf, writable=False)
        _check_match(source, target)
        dtype, how = tensor_operator(op, target)

        def run(channel: CollectiveChannel) -> None:
            tensor = raw_tensor(source, dtype)
            scan = channel.comm.exscan if before else channel.comm.scan
            first = before and channel.rank == 0  # whose result the standard leaves undefined
            out = torch.empty_like(tensor) if first else raw_tensor(target, dtype)
            scan(tensor.clone() if source is target else tensor, op=how, out=out)
            target.flush()

        return run


def _nothing() -> None:
    """Do nothing."""


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _check_sizes(sent: int, expected: int) -> None:
    if sent != expected:
        raise MPIError(
            C.ERR_TRUNCATE,
            f"{sent} bytes are sent where {expected} are expected",
            rule="in a collective, sent and received data have the same size",
        )


def _check_match(source: MessageBuffer, target: MessageBuffer) -> None:
    if source.count != target.count or source.layout is not target.layout:
        a, b = (f"{s.count} of {s.type.Get_name() or 'a derived datatype'}" for s in (source, target))
        raise ValueError(f"message: {a} are sent where {b} are expected")
