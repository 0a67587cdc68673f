"""Collectives that reduce buffers, prepared as the others: arguments are parsed at the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .buffers import MessageBuffer, in_place, parse_message
from .message_tensors import raw_tensor
from .op import Op, tensor_operator
from .prepared_collectives import PreparedCollectives, PreparedRun
from .state import CollectiveChannel


class PreparedReductions(PreparedCollectives):
    """Prepares the reductions of a communicator."""

    __slots__ = ()

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


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _check_match(source: MessageBuffer, target: MessageBuffer) -> None:
    if source.count != target.count or source.layout is not target.layout:
        a, b = (f"{s.count} of {s.type.Get_name() or 'a derived datatype'}" for s in (source, target))
        raise ValueError(f"message: {a} are sent where {b} are expected")
