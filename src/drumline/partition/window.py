"""Windows: each rank of an axis gets the rows that it wants of a split dim, and only what it does not own travels.

Rank r owns rows [bounds[r], bounds[r + 1]) of the whole and wants a span of rows, by their numbers in the whole; rows
before 0 or beyond the end are filled. Forward: each owner sends each peer the rows that the peer wants, in one message;
ranks that want nothing of each other exchange nothing. Backward: the gradients of those rows go the same way back and
are added to the owner's.

Where an axis has no halo, nothing travels: the rows of others are filled as those beyond the whole are.

A window has two halves, so that work fits between them: `begin` sends, `Halo.rows` waits. In the backward it is the
other way round: autograd runs the newest function first, so the gradients leave before the work between the halves is
differentiated, and are added after it.
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

from ..comm import points
from ..tracing.running import only_shapes
from .layout import Bounds
from .moves import Axis

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
    """The same with several spans per rank, laid one behind the other. Spans of one rank do not overlap."""
    halo = begin(x, dim, bounds, wanted, axis, fill)
    return halo.rows(*wanted[axis.index])


def rebalance(x: torch.Tensor, dim: int, bounds: Bounds, new: Bounds, axis: Axis) -> torch.Tensor:
    """The same whole, cut at other bounds: rows change hands, with or without halos."""
    return x if bounds == new else window(x, dim, bounds, tuple(pairwise(new)), axis.with_halo)


def begin(x: torch.Tensor, dim: int, bounds: Bounds, wanted: Sequence[Spans], axis: Axis, fill: float = 0.0) -> Halo:
    """Send to the others what they want. The rows of this rank are at hand at once, those of others when asked for."""
    dim %= x.dim()
    assert len(bounds) == axis.size + 1 == len(wanted) + 1, f"{bounds} and {wanted} on {axis.size} ranks"
    here = (bounds[axis.index], bounds[axis.index + 1])
    assert x.shape[dim] == here[1] - here[0], f"{x.shape[dim]} rows of {bounds} on rank {axis.index}"
    messages = route(tuple(bounds), tuple(wanted), axis.index) if axis.halo else Route((), ())
    mail = _Mail(messages, dim, here[0], axis)
    if not mail.route.sends and not mail.route.receives:
        return Halo(x, bounds, fill, mail)
    own, token = _Leave.apply(x, mail)  # type: ignore[no-untyped-call]  # torch's own
    return Halo(own, bounds, fill, mail, token)


# -- who sends what to whom


@dataclass(frozen=True, slots=True)
class Route:
    """The messages of one window as one rank sees them: (peer, rows), by peer."""

    sends: tuple[tuple[int, Spans], ...]
    receives: tuple[tuple[int, Spans], ...]


@lru_cache(maxsize=4096)
def route(bounds: Bounds, wanted: tuple[Spans, ...], rank: int) -> Route:
    """The messages of one rank."""
    ranks = [r for r in range(len(wanted)) if r != rank]
    sends = ((r, _owned(wanted[r], bounds, rank)) for r in ranks)
    receives = ((r, _owned(wanted[rank], bounds, r)) for r in ranks)
    return Route(tuple(s for s in sends if s[1]), tuple(s for s in receives if s[1]))


def rows_sent(bounds: Bounds, wanted: Sequence[Span], rank: int) -> int:
    """How many rows a rank sends in the forward: the formula of the halo. In the backward it receives as many."""
    messages = route(tuple(bounds), tuple((span,) for span in wanted), rank).sends
    return sum(_length(spans) for _, spans in messages)


def travels(bounds: Bounds, wanted: Sequence[Span]) -> bool:
    """Whether any rank needs rows of another."""
    return any(rows_sent(bounds, wanted, rank) for rank in range(len(wanted)))


def _owned(spans: Spans, bounds: Bounds, rank: int) -> Spans:
    """The parts of spans that a rank owns."""
    cut = ((max(a, bounds[rank]), min(b, bounds[rank + 1])) for a, b in spans)
    return tuple((a, b) for a, b in cut if a < b)


def _length(spans: Spans) -> int:
    return sum(b - a for a, b in spans)


# -- the messages


class _Mail:
    """The messages of one window, there and back."""

    def __init__(self, route: Route, dim: int, start: int, axis: Axis) -> None:
        self.route, self.dim, self.start, self.axis = route, dim, start, axis
        self._shape: list[int] = []
        self._works: list[Any] = []
        self._sent: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []
        self._back = False

    def leave(self, x: torch.Tensor) -> None:
        """Forward, first half: rows of this rank leave."""
        self._shape = list(x.shape)
        sent = [(peer, self._packed(x, spans)) for peer, spans in self.route.sends]
        self._post(x, sent, self.route.receives)

    def arrive(self) -> tuple[torch.Tensor, ...]:
        """Forward, second half: rows of others arrive."""
        return self._wait("halo")

    def leave_back(self, gradients: Sequence[torch.Tensor]) -> None:
        """Backward, first half: the gradients of others' rows leave."""
        peers = [peer for peer, _ in self.route.receives]
        sent = [(peer, g.contiguous()) for peer, g in zip(peers, gradients, strict=True)]
        self._back = True
        self._post(gradients[0], sent, self.route.sends)

    def arrive_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Backward, second half: what others say of this rank's rows is added."""
        if not self._back:  # nobody asked for the gradients of others' rows: they are zero
            zeros = [gradient.new_zeros(self._sized(spans)) for _, spans in self.route.receives]
            self._post(gradient, list(zip((p for p, _ in self.route.receives), zeros, strict=True)), self.route.sends)
        self._back = False
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
        if only_shapes(like):
            return  # only the shapes are wanted
        operations = [
            *((dist.irecv, t, peer) for t, (peer, _) in zip(self._received, receives, strict=True)),
            *((dist.isend, t, peer) for peer, t in sent),
        ]
        batch = [
            dist.P2POp(op, _bytes(t), group=self.axis.group, group_peer=peer) for op, t, peer in operations if t.numel()
        ]
        # NCCL wants all ranks of a group in its very first batch: a group must have done a collective before.
        self._works = points.batch(batch)

    def _wait(self, message: str) -> tuple[torch.Tensor, ...]:
        with ExitStack() as stack:
            for tensor in self._sent:
                stack.enter_context(self.axis.told(message, tensor))
            for work in self._works:
                work.wait()
        received, self._works, self._sent, self._received = tuple(self._received), [], [], []
        return received


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: backends do not know every type. One number may have any stride, and be contiguous."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Leave(torch.autograd.Function):
    """x -> x, and a token by which `_Arrive` hangs on it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mail: _Mail) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.mail = mail
        mail.leave(x)
        return x.view_as(x), x.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.mail.arrive_back(gradients[0]), None


class _Arrive(torch.autograd.Function):
    """The rows of others, a tensor for each of them."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, mail: _Mail) -> tuple[torch.Tensor, ...]:
        ctx.mail = mail
        return mail.arrive()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.mail.leave_back(gradients)
        return gradients[0].new_zeros(0), None


# -- the rows


class Halo:
    """A window under way."""

    def __init__(
        self, own: torch.Tensor, bounds: Bounds, fill: float, mail: _Mail, token: torch.Tensor | None = None
    ) -> None:
        self.own = own
        """What this rank owns; read this one, not the tensor that the window began with."""
        self._bounds, self._fill, self._mail, self._token = bounds, fill, mail, token
        self._others: dict[int, torch.Tensor] | None = None

    def here(self, start: int, stop: int) -> torch.Tensor:
        """Rows that are all this rank's own: nothing is waited for."""
        return _narrow(self.own, self._mail.dim, start - self._mail.start, stop - start)

    def rows(self, *spans: Span) -> torch.Tensor:
        """Rows among those that were wanted, one span behind the other."""
        self.finish()
        pieces = [piece for span in spans for piece in self._pieces(span)]
        if not pieces or (self.own.requires_grad and not any(piece.requires_grad for piece in pieces)):
            # Others may wait for this rank in the backward: what it computes must hang on what it owns.
            pieces.append(self.own.narrow(self._mail.dim, 0, 0))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self._mail.dim)

    def finish(self) -> None:
        """Wait for the rows of others, and until the own ones are sent."""
        if self._others is not None:
            return
        self._others = {}
        if self._token is not None and not self._mail.route.receives:
            self._mail.arrive()
        elif self._token is not None:
            received = _Arrive.apply(self._token, self._mail)  # type: ignore[no-untyped-call]  # torch's own
            peers = (peer for peer, _ in self._mail.route.receives)
            self._others = dict(zip(peers, received, strict=True))

    def _pieces(self, span: Span) -> Iterator[torch.Tensor]:
        size = self._bounds[-1]
        yield from self._filled(min(span[1], 0) - span[0])
        for rank in range(len(self._bounds) - 1):
            for a, b in _owned((span,), self._bounds, rank):
                if rank == self._mail.axis.index:
                    yield self.here(a, b)
                elif self._mail.axis.halo:
                    yield self._of(rank, a, b)
                else:
                    yield from self._filled(b - a)
        yield from self._filled(span[1] - max(span[0], size))

    def _of(self, rank: int, a: int, b: int) -> torch.Tensor:
        """Rows of another, out of its message."""
        assert self._others is not None
        at = 0
        for start, stop in dict(self._mail.route.receives)[rank]:
            if start <= a and b <= stop:
                return _narrow(self._others[rank], self._mail.dim, at + a - start, b - a)
            at += stop - start
        raise AssertionError(f"rows {a} to {b} of rank {rank} were not wanted")

    def _filled(self, rows: int) -> Iterator[torch.Tensor]:
        if rows > 0:
            shape = list(self.own.shape)
            shape[self._mail.dim] = rows
            yield self.own.new_full(shape, self._fill)


def _narrow(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return x if length == x.shape[dim] else x.narrow(dim, start, length)
