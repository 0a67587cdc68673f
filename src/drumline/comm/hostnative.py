"""All-reduce over hosts by the transports' own collectives: the network carries one segment while hosts add the next.

Inside a host each rank reduces its share of a segment; a rail, the ranks with the same number inside their hosts,
reduces the share over all hosts; then the shares are gathered inside. A thread sees to the rail, so that the network is
busy all the time but for the first and the last segment inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from .transport import Native, Transport

SEGMENT = 2 << 20
"""Bytes of a segment: long enough that starting a message costs little, short enough that little is not overlapped."""


class HostAllReduce:
    """The all-reduce of a `HostTransport` with equally many ranks on each host, as a communicator calls it."""

    def __init__(self, add: Native, gather: Native, small: Native, across: Native, *, d: int, hosts: int) -> None:
        self._add, self._gather, self._small, self._across = add, gather, small, across
        self._d, self._p = d, d * hosts
        # One thread: calls on a rail keep their order. It starts with the first call.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drumline rail")

    @classmethod
    def over(cls, inside: Transport, rail: Transport) -> HostAllReduce | None:
        """Where both transports bring along what is needed."""
        inner = [inside.native(name) for name in ("reduce_scatter", "all_gather", "all_reduce")]
        across = rail.native("all_reduce")
        add, gather, small = inner
        if add is None or gather is None or small is None or across is None:
            return None
        return cls(add, gather, small, across, d=inside.size, hosts=rail.size)

    def __call__(self, source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
        """In place; False for what one of the transports does not know, with `target` as it was."""
        assert target is not None
        if target.device.type != "cpu":
            return False
        plain = "sum" if op == "avg" else op
        whole = target.numel() - target.numel() % self._d
        shares: list[tuple[Tensor, Tensor, Future[bool]]] = []
        for segment in _segments(target[:whole], self._d):
            share = torch.empty(segment.numel() // self._d, dtype=target.dtype)
            if not self._add(segment, share, op=plain, root=0):
                return False
            shares.append((segment, share, self._thread.submit(self._across, share, share, op=plain, root=0)))
            if len(shares) == 1 and not shares[0][2].result():
                return False
        rest = target[whole:].clone()
        if rest.numel() and not self._reduce_rest(rest, plain):
            return False
        for segment, share, moving in shares:
            moving.result()
            self._gather(share, segment, op="", root=0)
        target[whole:] = rest
        if op == "avg":
            target.div_(self._p)
        return True

    def _reduce_rest(self, rest: Tensor, op: str) -> bool:
        """What cannot be shared out evenly: fewer elements than a host has ranks."""
        if not self._small(rest, rest, op=op, root=0):
            return False
        return self._thread.submit(self._across, rest, rest, op=op, root=0).result()


def _segments(tensor: Tensor, d: int) -> Iterator[Tensor]:
    step = max(d, SEGMENT // tensor.element_size() // d * d)
    for start in range(0, tensor.numel(), step):
        yield tensor[start : start + step]
