"""Runs one rank's part of any schedule over a transport: the one place where collectives move data.

A chunk is read where it is `held` and written where its `home` is: the caller's input, its output, or memory aside for
what is only passed on. While the two differ nothing of the input changes, and nothing is copied that need not be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ..schedules import Schedule, Send, Traffic, messages
from ..schedules.contracts import pair
from .ops import Into
from .transport import Pending, Transport

Place = tuple[int, int]
"""Where a chunk begins and ends in a buffer."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one round."""

    sends: tuple[tuple[int, tuple[int, ...]], ...]
    """(dst, the chunks of one message)."""
    receives: tuple[tuple[int, tuple[int, ...]], ...]
    """(src, the chunks of one message)."""
    writes: tuple[tuple[int, int, bool, bool], ...]
    """(receive, chunk, whether it is added, whether what came is the first operand), in the order of the schedule."""
    leaving: frozenset[int]
    """The chunks that it sends."""
    once: tuple[bool, ...]
    """By receive: whether each of its chunks comes only once in this round."""
    added: frozenset[int]
    """The chunks that are added to."""


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of a schedule, and what its contract says of the chunks."""

    schedule: Schedule
    rank: int
    steps: tuple[Step | None, ...]
    """By round; None where the rank has nothing to do."""
    given: tuple[bool, ...]
    """By chunk: whether the rank has a contribution to it at the start."""
    wanted: tuple[bool, ...]
    """By chunk: whether it is promised to the rank at the end."""


@lru_cache(maxsize=512)
def program(schedule: Schedule, rank: int) -> Program:
    """Compiled once, because training runs the same schedule every step."""
    contract, chunks = schedule.contract, range(schedule.chunks)
    return Program(
        schedule,
        rank,
        tuple(_step(schedule, tuple(group), rank) for group in schedule.rounds),
        tuple(contract.before(schedule, rank, c) for c in chunks),
        tuple(contract.after(schedule, rank, c) is not None for c in chunks),
    )


def _step(schedule: Schedule, group: tuple[Send, ...], rank: int) -> Step | None:
    mine = [s for s in group if rank in (s.src, s.dst)]
    if not mine:
        return None
    found = messages(mine)
    sends = tuple((dst, tuple(s.chunk for s in parts)) for (src, dst), parts in found.items() if src == rank)
    receives = tuple((src, tuple(s.chunk for s in parts)) for (src, dst), parts in found.items() if dst == rank)
    number = {src: i for i, (src, _) in enumerate(receives)}
    coming = [s for s in mine if s.dst == rank]
    writes = tuple((number[s.src], s.chunk, s.reduce, schedule.received_first(s)) for s in coming)
    arrivals = [s.chunk for s in coming]
    once = tuple(all(arrivals.count(c) == 1 for c in chunks) for _, chunks in receives)
    leaving = frozenset(c for _, chunks in sends for c in chunks)
    return Step(sends, receives, writes, leaving, once, frozenset(s.chunk for s in coming if s.reduce))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the chunks of a buffer of some size lie in what a rank gives and in what it gets."""

    sizes: tuple[int, ...]
    """Elements, by chunk."""
    source: tuple[Place | None, ...]
    """By chunk; None where the rank has no contribution to it."""
    target: tuple[Place | None, ...]
    """By chunk; None where it is not promised to the rank."""


def whole_layout(part: Program, elements: int, *, unit: int = 1) -> Layout:
    """Of a rank that gives and gets the whole buffer, each chunk at its place in it."""
    ranges = tuple((unit * a, unit * b) for a, b in part.schedule.ranges(elements // unit))
    return Layout(tuple(b - a for a, b in ranges), ranges, ranges)


def layout(part: Program, elements: int, *, unit: int = 1) -> Layout:
    """Of a whole buffer of that many elements; `unit` of them are never cut apart.

    A rank gives the stretch of the buffer that it has contributions to, and gets the stretch that it is promised: its
    own share, or all of it.
    """
    schedule = part.schedule
    ranges = [(unit * a, unit * b) for a, b in schedule.ranges(elements // unit)]
    given = [place if part.given[c] else None for c, place in enumerate(ranges)]
    wanted = [place if part.wanted[c] else None for c, place in enumerate(ranges)]
    if schedule.contract.chunk_names == "pairs":
        # the block from rank s is sent from place `rank` of its buffer, and kept at place s of ours
        block = elements // schedule.p
        for c, place in enumerate(wanted):
            if place is not None:
                move = (pair(schedule, c)[0] - part.rank) * block
                wanted[c] = (place[0] + move, place[1] + move)
    return Layout(tuple(b - a for a, b in ranges), _from_zero(given), _from_zero(wanted))


def _from_zero(places: list[Place | None]) -> tuple[Place | None, ...]:
    first = min((place[0] for place in places if place is not None), default=0)
    return tuple(None if place is None else (place[0] - first, place[1] - first) for place in places)


@dataclass(slots=True)
class Run:
    """One collective under way on one rank."""

    transport: Transport
    into: Into | None
    new: Callable[[int], Tensor]
    """Memory aside for that many elements."""
    sizes: tuple[int, ...]
    held: dict[int, Tensor]
    """Where each chunk is read."""
    home: dict[int, Tensor]
    """Where each chunk is written; made when a chunk without a place comes first."""
    traffic: Traffic = field(default_factory=Traffic)
    spare: dict[int, list[Tensor]] = field(default_factory=dict)
    """Receive buffers of earlier rounds, by their size."""

    def round(self, step: Step, tag: int) -> None:
        """Receive beside what is sent, send what is held, and change it only when it has left."""
        aside: list[Tensor] = []
        buffers = [self._buffer(i, step, aside) for i in range(len(step.receives))]
        leaving = [(self._packed(chunks), dst) for dst, chunks in step.sends]
        arriving = [(buffer, src) for buffer, (src, _) in zip(buffers, step.receives, strict=True)]
        coming, going = self.transport.exchange(leaving, arriving, tag)
        self._write(step, buffers, coming, going)
        for pending in going:
            pending.wait()
        size = sum(message.numel() * message.element_size() for message, _ in leaving)
        self.traffic += Traffic(1, len(leaving), size)
        for buffer in aside:
            self.spare.setdefault(buffer.numel(), []).append(buffer)

    def _write(self, step: Step, buffers: list[Tensor], coming: list[Pending], going: list[Pending]) -> None:
        """Add or keep what came, in the order of the schedule; messages are waited for when they are needed."""
        starts: dict[int, int] = {}
        waiting = dict(enumerate(coming))
        for number, chunk, add, received_first in step.writes:
            if number in waiting:
                waiting.pop(number).wait()
            start = starts.get(number, 0)
            starts[number] = start + self.sizes[chunk]
            received = buffers[number][start : start + self.sizes[chunk]]
            home = self._home(chunk)
            held = self.held.get(chunk)
            if going and chunk in step.leaving and held is home:
                # The peers' sends may end only when they are received here: so receive all before waiting for ours.
                for pending in waiting.values():
                    pending.wait()
                waiting.clear()
                while going:
                    going.pop().wait()
            if add and self.sizes[chunk]:  # a barrier adds nothing to nothing
                assert self.into is not None and held is not None
                first, second = (received, held) if received_first else (held, received)
                self.into(first, second, home)
            elif received.data_ptr() != home.data_ptr():
                home.copy_(received)
            self.held[chunk] = home

    def _home(self, chunk: int) -> Tensor:
        home = self.home.get(chunk)
        if home is None:
            home = self.home[chunk] = self.new(self.sizes[chunk])
        return home

    def _buffer(self, receive: int, step: Step, aside: list[Tensor]) -> Tensor:
        """Where a message is received: at home if that is free in this round, else aside."""
        chunks = step.receives[receive][1]
        size = sum(self.sizes[c] for c in chunks)
        if step.once[receive]:
            if not any(c in self.home for c in chunks):
                whole = self.new(size)
                self.home.update(zip(chunks, whole.split([self.sizes[c] for c in chunks]), strict=True))
                return whole
            if all(self._is_free(c, step) for c in chunks):
                homes = _joined([self._home(c) for c in chunks])
                if homes is not None:
                    return homes
        free = self.spare.get(size)
        buffer = free.pop() if free else self.new(size)
        aside.append(buffer)
        return buffer

    def _is_free(self, chunk: int, step: Step) -> bool:
        """Whether a chunk's home may be written before the round has ended."""
        if self.held.get(chunk) is not self.home.get(chunk):
            return True  # what is held stays where it is, also for a sum
        return chunk not in step.leaving and chunk not in step.added

    def _packed(self, chunks: tuple[int, ...]) -> Tensor:
        """The chunks of one message, one after the other; in place where they lie so."""
        parts = [self.held[c] for c in chunks]
        joined = _joined(parts)
        return torch.cat(parts) if joined is None else joined


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Pieces that follow each other in one memory as one tensor; None where they do not."""
    if len(parts) == 1:
        return parts[0]
    full = [part for part in parts if part.numel()]
    if not full:
        return parts[0]
    first = full[0]
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in full:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != storage:
            return None
        at += part.numel() * part.element_size()
    return first.as_strided((sum(part.numel() for part in full),), (1,))


def execute(
    part: Program,
    places: Layout,
    source: Tensor | None,
    target: Tensor | None,
    *,
    transport: Transport,
    next_tag: Callable[[], int],
    into: Into | None = None,
    like: Tensor,
) -> Traffic:
    """Run all rounds on flat tensors; what this rank sent. `source` may be `target`: then it is changed in place.

    Chunks that are not promised are left as they came, where they have a place in `target`.
    """
    held, home = _pieces(places.source, source), _pieces(places.target, target)
    if source is target:
        for chunk, piece in held.items():
            home.setdefault(chunk, piece)
            held[chunk] = home[chunk]
    run = Run(transport, into, lambda n: like.new_empty(n), places.sizes, held, home)
    for step in part.steps:
        tag = next_tag()
        if step is not None:
            run.round(step, tag)
    for chunk, place in enumerate(places.target):
        if place is not None and target is not None and run.held[chunk] is not run.home[chunk]:
            run.home[chunk].copy_(run.held[chunk])
    return run.traffic


def _pieces(places: tuple[Place | None, ...], buffer: Tensor | None) -> dict[int, Tensor]:
    if buffer is None:
        return {}
    return {c: buffer[place[0] : place[1]] for c, place in enumerate(places) if place is not None}
