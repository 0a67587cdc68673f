"""Halo exchange: each rank of an axis gets the rows that it wants of a split dim, and only foreign rows are sent.

Rank r owns rows [bounds[r], bounds[r + 1]) of the whole and wants a span of rows, numbered as in the whole; rows before
0 or beyond the end are filled. Forward: each owner sends each peer the rows that the peer wants, in one message; ranks
that need nothing of each other exchange nothing. Backward: the gradients of those rows are sent back and added to the
owner's.

On an axis without halo nothing is sent: foreign rows are filled like those beyond the whole.

A window has two halves, to overlap it with work: `start_exchange` sends, `Halo.rows` waits. The backward is reversed:
autograd runs the newest function first, so gradients are sent before the work between the halves is differentiated, and
added after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ...comm import gloo_fallbacks
from ...torchkit.fake_tensors import is_shape_only
from .layout import Bounds
from .redistribution import Axis

Span = tuple[int, int]
"""Rows [start, stop) of the whole."""
Spans = tuple[Span, ...]


def window(
    x: torch.Tensor, dim: int, bounds: Bounds, wanted: Sequence[Span], axis: Axis, fill: float = 0.0
) -> torch.Tensor:
    """The span that this rank wants; wanted[r] is rank r's. Spans may overlap, be empty, and reach beyond the whole."""
    return windows(x, dim, bounds, tuple((span,) for span in wanted), axis, fill)


def windows(
    x: torch.Tensor, dim: int, bounds: Bounds, wanted: Sequence[Spans], axis: Axis, fill: float = 0.0
) -> torch.Tensor:
    """The same with several spans per rank, concatenated. Spans of one rank do not overlap."""
    halo = start_exchange(x, dim, bounds, wanted, axis, fill)
    return halo.rows(*wanted[axis.index])


def rebalance(x: torch.Tensor, dim: int, bounds: Bounds, new: Bounds, axis: Axis) -> torch.Tensor:
    """The same tensor, cut at other bounds: rows change owners, with or without halos."""
    return x if bounds == new else window(x, dim, bounds, tuple(pairwise(new)), axis.with_halo)


def start_exchange(
    x: torch.Tensor, dim: int, bounds: Bounds, wanted: Sequence[Spans], axis: Axis, fill: float = 0.0
) -> Halo:
    """Send other ranks what they want. This rank's rows are available at once, foreign rows when asked for."""
    dim %= x.dim()
    assert len(bounds) == axis.size + 1 == len(wanted) + 1, f"{bounds} and {wanted} on {axis.size} ranks"
    here = (bounds[axis.index], bounds[axis.index + 1])
    assert x.shape[dim] == here[1] - here[0], f"{x.shape[dim]} rows of {bounds} on rank {axis.index}"
    own_route = route(tuple(bounds), tuple(wanted), axis.index) if axis.halo else HaloRoute((), ())
    messages = _HaloMessages(own_route, dim, here[0], axis)
    if not messages.route.sends and not messages.route.receives:
        return Halo(x, bounds, fill, messages)
    own, token = _Send.apply(x, messages)  # type: ignore[no-untyped-call]  # torch's own
    return Halo(own, bounds, fill, messages, token)


# -- routes


@dataclass(frozen=True, slots=True)
class HaloRoute:
    """The messages of one window, from one rank's view: (peer, rows), by peer."""

    sends: tuple[tuple[int, Spans], ...]
    receives: tuple[tuple[int, Spans], ...]


@lru_cache(maxsize=4096)
def route(bounds: Bounds, wanted: tuple[Spans, ...], rank: int) -> HaloRoute:
    """The messages of one rank."""
    ranks = [r for r in range(len(wanted)) if r != rank]
    sends = ((r, _owned(wanted[r], bounds, rank)) for r in ranks)
    receives = ((r, _owned(wanted[rank], bounds, r)) for r in ranks)
    return HaloRoute(tuple(s for s in sends if s[1]), tuple(s for s in receives if s[1]))


def rows_sent(bounds: Bounds, wanted: Sequence[Span], rank: int) -> int:
    """Rows that a rank sends in the forward: the formula of the halo. In the backward it receives as many."""
    messages = route(tuple(bounds), tuple((span,) for span in wanted), rank).sends
    return sum(_length(spans) for _, spans in messages)


def needs_exchange(bounds: Bounds, wanted: Sequence[Span]) -> bool:
    """Whether any rank needs rows of another."""
    return any(rows_sent(bounds, wanted, rank) for rank in range(len(wanted)))


def _owned(spans: Spans, bounds: Bounds, rank: int) -> Spans:
    """The parts of spans that a rank owns."""
    cut = ((max(a, bounds[rank]), min(b, bounds[rank + 1])) for a, b in spans)
    return tuple((a, b) for a, b in cut if a < b)


def _length(spans: Spans) -> int:
    return sum(b - a for a, b in spans)


# -- messages


class _HaloMessages:
    """The messages of one window, forward and backward."""

    def __init__(self, route: HaloRoute, dim: int, start: int, axis: Axis) -> None:
        self.route, self.dim, self.start, self.axis = route, dim, start, axis
        self._shape: list[int] = []
        self._works: list[Any] = []
        self._sent: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []
        self._sent_gradients = False

    def send(self, x: torch.Tensor) -> None:
        """Forward, first half: send this rank's rows."""
        self._shape = list(x.shape)
        sent = [(peer, self._packed(x, spans)) for peer, spans in self.route.sends]
        self._post(x, sent, self.route.receives)

    def receive(self) -> tuple[torch.Tensor, ...]:
        """Forward, second half: wait for foreign rows."""
        return self._wait("halo")

    def send_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Backward, first half: send the gradients of foreign rows."""
        peers = [peer for peer, _ in self.route.receives]
        sent = [(peer, g.contiguous()) for peer, g in zip(peers, gradients, strict=True)]
        self._sent_gradients = True
        self._post(gradients[0], sent, self.route.sends)

    def receive_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        """Backward, second half: add the gradients that other ranks computed for this rank's rows."""
        if not self._sent_gradients:  # the gradients of foreign rows were not needed: they are zero
            zeros = [gradient.new_zeros(self._sized(spans)) for _, spans in self.route.receives]
            self._post(gradient, list(zip((p for p, _ in self.route.receives), zeros, strict=True)), self.route.sends)
        self._sent_gradients = False
        total = gradient.clone()
        for (_, spans), received in zip(self.route.sends, self._wait("halo back"), strict=True):
            at = 0
            for a, b in spans:
                total.narrow(self.dim, a - self.start, b - a).add_(received.narrow(self.dim, at, b - a))
                at += b - a
        return total

    def _packed(self, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        rows = [x.narrow(self.dim, a - self.start, b - a) for a, b in spans]
        return (rows[0] if len(rows) == 1 else torch.cat(rows, self.dim)).contiguous()

    def _sized(self, spans: Spans) -> list[int]:
        return [*self._shape[: self.dim], _length(spans), *self._shape[self.dim + 1 :]]

    def _post(
        self, like: torch.Tensor, sent: list[tuple[int, torch.Tensor]], receives: tuple[tuple[int, Spans], ...]
    ) -> None:
        self._sent = [tensor for _, tensor in sent]
        self._received = [like.new_empty(self._sized(spans)) for _, spans in receives]
        if is_shape_only(like):
            return  # only shapes are needed
        operations = [
            *((dist.irecv, t, peer) for t, (peer, _) in zip(self._received, receives, strict=True)),
            *((dist.isend, t, peer) for peer, t in sent),
        ]
        batch = [
            dist.P2POp(op, _bytes(t), group=self.axis.group, group_peer=peer) for op, t, peer in operations if t.numel()
        ]
        # NCCL requires all ranks of a group in its first batch: the group must have run a collective before.
        self._works = gloo_fallbacks.batch_isend_irecv(batch)

    def _wait(self, message: str) -> tuple[torch.Tensor, ...]:
        with ExitStack() as stack:
            for tensor in self._sent:
                stack.enter_context(self.axis.observe(message, tensor))
            for work in self._works:
                work.wait()
        received, self._works, self._sent, self._received = tuple(self._received), [], [], []
        return received


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: backends do not support every type. One value may have any stride and be contiguous."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Send(torch.autograd.Function):
    """x -> x, and a token that makes `_Receive` depend on it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, messages: _HaloMessages) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.messages = messages
        messages.send(x)
        return x.view_as(x), x.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.messages.receive_gradients(gradients[0]), None


class _Receive(torch.autograd.Function):
    """Foreign rows, one tensor per peer."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, messages: _HaloMessages) -> tuple[torch.Tensor, ...]:
        ctx.messages = messages
        return messages.receive()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.messages.send_gradients(gradients)
        return gradients[0].new_zeros(0), None


# -- rows


class Halo:
    """A window in progress."""

    def __init__(
        self, own: torch.Tensor, bounds: Bounds, fill: float, messages: _HaloMessages, token: torch.Tensor | None = None
    ) -> None:
        self.own = own
        """This rank's own rows; read these, not the tensor that the window began with."""
        self._bounds, self._fill, self._messages, self._token = bounds, fill, messages, token
        self._foreign: dict[int, torch.Tensor] | None = None

    def here(self, start: int, stop: int) -> torch.Tensor:
        """Rows that this rank owns: no waiting."""
        return _narrow(self.own, self._messages.dim, start - self._messages.start, stop - start)

    def rows(self, *spans: Span) -> torch.Tensor:
        """Rows among those that were wanted, spans concatenated."""
        self.finish()
        pieces = [piece for span in spans for piece in self._pieces(span)]
        if not pieces or (self.own.requires_grad and not any(piece.requires_grad for piece in pieces)):
            # Other ranks may wait for this one in the backward: the result must depend on its own rows.
            pieces.append(self.own.narrow(self._messages.dim, 0, 0))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self._messages.dim)

    def finish(self) -> None:
        """Wait for foreign rows, and until the own ones are sent."""
        if self._foreign is not None:
            return
        self._foreign = {}
        if self._token is not None and not self._messages.route.receives:
            self._messages.receive()
        elif self._token is not None:
            received = _Receive.apply(self._token, self._messages)  # type: ignore[no-untyped-call]  # torch's own
            peers = (peer for peer, _ in self._messages.route.receives)
            self._foreign = dict(zip(peers, received, strict=True))

    def _pieces(self, span: Span) -> Iterator[torch.Tensor]:
        size = self._bounds[-1]
        yield from self._filled(min(span[1], 0) - span[0])
        for rank in range(len(self._bounds) - 1):
            for a, b in _owned((span,), self._bounds, rank):
                if rank == self._messages.axis.index:
                    yield self.here(a, b)
                elif self._messages.axis.halo:
                    yield self._of(rank, a, b)
                else:
                    yield from self._filled(b - a)
        yield from self._filled(span[1] - max(span[0], size))

    def _of(self, rank: int, a: int, b: int) -> torch.Tensor:
        """Rows of another rank, from its message."""
        assert self._foreign is not None
        at = 0
        for start, stop in dict(self._messages.route.receives)[rank]:
            if start <= a and b <= stop:
                return _narrow(self._foreign[rank], self._messages.dim, at + a - start, b - a)
            at += stop - start
        raise AssertionError(f"rows {a} to {b} of rank {rank} were not requested")

    def _filled(self, rows: int) -> Iterator[torch.Tensor]:
        if rows > 0:
            shape = list(self.own.shape)
            shape[self._messages.dim] = rows
            yield self.own.new_full(shape, self._fill)


def _narrow(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return x if length == x.shape[dim] else x.narrow(dim, start, length)
