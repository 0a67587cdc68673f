"""The communicator: runs any schedule over any transport, and counts what it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import InputError, nearest
from ..schedule import Schedule, Send, Traffic, collective_schedule, messages
from .group import Group
from .transport import Transport

Operation = Callable[..., Tensor]

OPERATIONS: dict[str, Operation] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""What a reduction may compute, of two operands."""

_TAGS = 1 << 16
"""Tags of one context; those of rounds run through them again and again, messages of one tag keep their order."""
_CONTEXTS = 1 << 15
"""With _TAGS this fills the 31 bits that transports have for a tag."""


class Communicator:
    """A group of ranks that call collectives together, each rank with its own tensor."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._root = transport
        self._context = 0
        self._tag = 0
        self._traffic = Traffic()

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._transport.size

    @property
    def traffic(self) -> Traffic:
        """What this rank has taken part in and sent so far."""
        return self._traffic

    def all_reduce(self, tensor: Tensor, *, algorithm: str = "ring", op: str = "sum") -> Tensor:
        """Replace `tensor`, on every rank, by the sum (or `op`) over all ranks; return it."""
        self.run(collective_schedule("all_reduce", algorithm, self.size), tensor, op=op)
        return tensor

    def broadcast(self, tensor: Tensor, *, root: int = 0, algorithm: str = "binomial") -> Tensor:
        """Replace `tensor`, on every rank, by what `root` has in it; return it."""
        self.run(collective_schedule("broadcast", algorithm, self.size, root=root), tensor)
        return tensor

    def run(self, schedule: Schedule, tensor: Tensor, *, op: str = "sum") -> Traffic:
        """Run any schedule in place on a tensor of any shape; what this rank sent.

        Chunks of which the contract says nothing (other shares after a reduce-scatter) are left with partial results.
        """
        if op not in OPERATIONS:
            raise InputError(
                f"unknown operation {op!r}", rule=f"known: {', '.join(OPERATIONS)}", fix=nearest(op, OPERATIONS)
            )
        if schedule.p != self.size:
            raise InputError(f"{schedule.name} for {schedule.p} ranks on {self.size}", rule="p is the number of ranks")
        _check(tensor)
        with torch.no_grad():
            # Not reshape(-1): of a strided vector that is a view with gaps, and messages need none.
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            pieces = [flat[start:stop] for start, stop in schedule.ranges(flat.numel())]
            traffic = self._execute(schedule, pieces, OPERATIONS[op])
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
        return traffic

    def split(self, color: int, key: int = 0) -> Communicator:
        """A communicator of the ranks that gave the same color, ordered by key and then by rank. All ranks call it."""
        mine = torch.tensor([color, key, self._root.contexts])
        table = torch.zeros(self.size, 3, dtype=torch.int64)
        table[self.rank] = mine
        self.run(collective_schedule("all_gather", "ring", self.size), table)
        rows = table.tolist()
        members = sorted((row[1], rank) for rank, row in enumerate(rows) if row[0] == color)
        # One more than any member has seen: no two groups that share two ranks have the same context.
        context = self._root.contexts = 1 + max(row[2] for row in rows)
        if context >= _CONTEXTS:
            raise InputError(f"split for the {context}th time", rule=f"at most {_CONTEXTS - 1} groups of a transport")
        child = Communicator(Group(self._transport, tuple(rank for _, rank in members)))
        child._root, child._context = self._root, context
        return child

    def _execute(self, schedule: Schedule, pieces: Sequence[Tensor], operation: Operation) -> Traffic:
        """All rounds: receive beside what is held, send what is held, and change it only when both are through."""
        before = self._traffic
        for step in _program(schedule, self.rank):
            if step.idle:
                self._next_tag()
                continue
            self._round(step, pieces, operation, received_first=schedule.order == "received")
        return self._traffic - before

    def _round(self, step: _Step, pieces: Sequence[Tensor], operation: Operation, *, received_first: bool) -> None:
        tag = self._next_tag()
        buffers = [_buffer(parts, pieces, step.leaving) for _, parts in step.receives]
        receiving = [
            self._transport.receive(buffer, src, tag)
            for buffer, (src, _) in zip(buffers, step.receives, strict=True)
        ]
        sending = []
        for dst, parts in step.sends:
            message = _pack(parts, pieces)
            sending.append(self._transport.send(message, dst, tag))
            self._traffic += Traffic(messages=1, bytes=message.numel() * message.element_size())
        for pending in (*receiving, *sending):
            pending.wait()
        for buffer, (_, parts) in zip(buffers, step.receives, strict=True):
            _apply(buffer, parts, pieces, operation, received_first=received_first)
        self._traffic += Traffic(rounds=1)

    def _next_tag(self) -> int:
        tag = self._context * _TAGS + self._tag
        self._tag = (self._tag + 1) % _TAGS
        return tag

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}: {self._traffic}"


@dataclass(frozen=True, slots=True)
class _Step:
    """What one rank does in one round."""

    sends: tuple[tuple[int, tuple[Send, ...]], ...]
    """(dst, the sends of one message)."""
    receives: tuple[tuple[int, tuple[Send, ...]], ...]
    """(src, the sends of one message)."""
    leaving: frozenset[int]
    """The chunks that it sends."""

    @property
    def idle(self) -> bool:
        return not self.sends and not self.receives


@lru_cache(maxsize=256)
def _program(schedule: Schedule, rank: int) -> tuple[_Step, ...]:
    """One rank's part of a schedule, kept because training runs the same schedule every step."""
    steps = []
    for group in schedule.rounds:
        found = messages(s for s in group if rank in (s.src, s.dst))
        sends = tuple((dst, tuple(parts)) for (src, dst), parts in found.items() if src == rank)
        receives = tuple((src, tuple(parts)) for (src, dst), parts in found.items() if dst == rank)
        steps.append(_Step(sends, receives, frozenset(s.chunk for _, parts in sends for s in parts)))
    return tuple(steps)


def _buffer(parts: tuple[Send, ...], pieces: Sequence[Tensor], leaving: frozenset[int]) -> Tensor:
    """Where a message is received: in place if it is one chunk that is kept and not being sent, else beside."""
    first = parts[0]
    if len(parts) == 1 and not first.reduce and first.chunk not in leaving:
        return pieces[first.chunk]
    return pieces[first.chunk].new_empty(sum(pieces[s.chunk].numel() for s in parts))


def _pack(parts: tuple[Send, ...], pieces: Sequence[Tensor]) -> Tensor:
    """The chunks of one message, one after the other."""
    if len(parts) == 1:
        return pieces[parts[0].chunk]
    return torch.cat([pieces[s.chunk] for s in parts])


def _apply(
    buffer: Tensor, parts: tuple[Send, ...], pieces: Sequence[Tensor], operation: Operation, *, received_first: bool
) -> None:
    """Add or keep the chunks of one received message."""
    start = 0
    for send in parts:
        piece = pieces[send.chunk]
        received = buffer[start : start + piece.numel()]
        start += piece.numel()
        if send.reduce:
            first, second = (received, piece) if received_first else (piece, received)
            operation(first, second, out=piece)
        elif received.data_ptr() != piece.data_ptr():
            piece.copy_(received)


def _check(tensor: Tensor) -> None:
    """Refuse what cannot be changed in place element by element."""
    if tensor.layout != torch.strided:
        raise InputError(f"a tensor of layout {tensor.layout}", rule="collectives take dense tensors")
    if any(stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise InputError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            rule="each element has its own memory",
            fix="call .contiguous() on the expanded tensor",
        )
