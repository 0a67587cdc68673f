"""Run one rank's part of any schedule over a transport: the one place where collectives move data.

A chunk is read from its `current` tensor and written to its `home`: the caller's input, its output, or scratch memory
for chunks that are only forwarded. While the two differ the input is unchanged, and nothing is copied needlessly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ..schedules import Schedule, Send, Traffic, messages
from ..schedules.contracts import pair
from .buffers import joined
from .operators import ReduceInto
from .transport import PendingMessage, Transport

ChunkRange = tuple[int, int]
"""(start, stop) of a chunk in a buffer."""


@dataclass(frozen=True, slots=True)
class RankRound:
    """One rank's part of one round."""

    sends: tuple[tuple[int, tuple[int, ...]], ...]
    """(dst, the chunks of one message)."""
    receives: tuple[tuple[int, tuple[int, ...]], ...]
    """(src, the chunks of one message)."""
    writes: tuple[tuple[int, int, bool, bool], ...]
    """(receive, chunk, whether to reduce, whether the received operand is first), in schedule order."""
    sent: frozenset[int]
    """The chunks that it sends."""
    once: tuple[bool, ...]
    """By receive: whether each of its chunks arrives only once in this round."""
    reduced: frozenset[int]
    """The chunks that it reduces."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's part of a schedule, and its chunks by the contract."""

    schedule: Schedule
    rank: int
    rounds: tuple[RankRound | None, ...]
    """By round; None if the rank has nothing to do."""
    given: tuple[bool, ...]
    """By chunk: whether the rank contributes to it."""
    wanted: tuple[bool, ...]
    """By chunk: whether the rank has it at the end."""


@lru_cache(maxsize=512)
def compile_schedule(schedule: Schedule, rank: int) -> RankProgram:
    """One rank's part of a schedule; cached, because training runs the same one every step."""
    contract, chunks = schedule.contract, range(schedule.chunks)
    return RankProgram(
        schedule,
        rank,
        tuple(_round(schedule, tuple(group), rank) for group in schedule.rounds),
        tuple(contract.before(schedule, rank, c) for c in chunks),
        tuple(contract.after(schedule, rank, c) is not None for c in chunks),
    )


def _round(schedule: Schedule, group: tuple[Send, ...], rank: int) -> RankRound | None:
    mine = [s for s in group if rank in (s.src, s.dst)]
    if not mine:
        return None
    grouped = messages(mine)
    sends = tuple((dst, tuple(s.chunk for s in parts)) for (src, dst), parts in grouped.items() if src == rank)
    receives = tuple((src, tuple(s.chunk for s in parts)) for (src, dst), parts in grouped.items() if dst == rank)
    number = {src: i for i, (src, _) in enumerate(receives)}
    incoming = [s for s in mine if s.dst == rank]
    writes = tuple((number[s.src], s.chunk, s.reduce, schedule.received_first(s)) for s in incoming)
    arrivals = [s.chunk for s in incoming]
    once = tuple(all(arrivals.count(c) == 1 for c in chunks) for _, chunks in receives)
    sent = frozenset(c for _, chunks in sends for c in chunks)
    return RankRound(sends, receives, writes, sent, once, frozenset(s.chunk for s in incoming if s.reduce))


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where chunks are in a rank's input and output, for one buffer size."""

    sizes: tuple[int, ...]
    """Elements, by chunk."""
    source: tuple[ChunkRange | None, ...]
    """By chunk; None if the rank does not contribute to it."""
    target: tuple[ChunkRange | None, ...]
    """By chunk; None if the rank does not end with it."""


def whole_buffer_layout(program: RankProgram, elements: int, *, unit: int = 1) -> ChunkLayout:
    """The layout if input and output are both the whole buffer."""
    ranges = tuple((unit * a, unit * b) for a, b in program.schedule.ranges(elements // unit))
    return ChunkLayout(tuple(b - a for a, b in ranges), ranges, ranges)


def chunk_layout(program: RankProgram, elements: int, *, unit: int = 1) -> ChunkLayout:
    """The layout for a whole buffer of `elements`; groups of `unit` elements are never split.

    A rank's input is the range that it contributes to, its output the range that it ends with: its share, or all.
    """
    schedule = program.schedule
    ranges = [(unit * a, unit * b) for a, b in schedule.ranges(elements // unit)]
    given = [place if program.given[c] else None for c, place in enumerate(ranges)]
    wanted = [place if program.wanted[c] else None for c, place in enumerate(ranges)]
    if schedule.contract.chunk_names == "pairs":
        # the block from rank s is sent from position `rank` of its buffer and stored at position s of ours
        block = elements // schedule.p
        for c, place in enumerate(wanted):
            if place is not None:
                move = (pair(schedule, c)[0] - program.rank) * block
                wanted[c] = (place[0] + move, place[1] + move)
    return ChunkLayout(tuple(b - a for a, b in ranges), _from_zero(given), _from_zero(wanted))


def _from_zero(places: list[ChunkRange | None]) -> tuple[ChunkRange | None, ...]:
    first = min((place[0] for place in places if place is not None), default=0)
    return tuple(None if place is None else (place[0] - first, place[1] - first) for place in places)


@dataclass(slots=True)
class ScheduleRun:
    """One collective in progress on one rank."""

    transport: Transport
    into: ReduceInto | None
    new: Callable[[int], Tensor]
    """Allocates scratch memory for n elements."""
    sizes: tuple[int, ...]
    current: dict[int, Tensor]
    """Where each chunk is read from."""
    home: dict[int, Tensor]
    """Where each chunk is written to; allocated when a chunk without a place first arrives."""
    traffic: Traffic = field(default_factory=Traffic)
    spare: dict[int, list[Tensor]] = field(default_factory=dict)
    """Receive buffers of earlier rounds, by size."""

    def round(self, step: RankRound, tag: int) -> None:
        """Exchange the messages of a round; a chunk is overwritten only after it is sent."""
        scratch: list[Tensor] = []
        buffers = [self._buffer(i, step, scratch) for i in range(len(step.receives))]
        outgoing = [(self._packed(chunks), dst) for dst, chunks in step.sends]
        incoming = [(buffer, src) for buffer, (src, _) in zip(buffers, step.receives, strict=True)]
        receives, sends = self.transport.exchange(outgoing, incoming, tag)
        self._write(step, buffers, receives, sends)
        for pending in sends:
            pending.wait()
        size = sum(message.numel() * message.element_size() for message, _ in outgoing)
        self.traffic += Traffic(1, len(outgoing), size)
        for buffer in scratch:
            self.spare.setdefault(buffer.numel(), []).append(buffer)

    def _write(
        self, step: RankRound, buffers: list[Tensor], receives: list[PendingMessage], sends: list[PendingMessage]
    ) -> None:
        """Reduce or store received chunks in schedule order; wait for a message only when it is needed."""
        starts: dict[int, int] = {}
        waiting = dict(enumerate(receives))
        for number, chunk, reduce, received_first in step.writes:
            if number in waiting:
                waiting.pop(number).wait()
            start = starts.get(number, 0)
            starts[number] = start + self.sizes[chunk]
            received = buffers[number][start : start + self.sizes[chunk]]
            home = self._home(chunk)
            current = self.current.get(chunk)
            if sends and chunk in step.sent and current is home:
                # Peers' sends may complete only when received here, so receive all before waiting for our sends.
                for pending in waiting.values():
                    pending.wait()
                waiting.clear()
                while sends:
                    sends.pop().wait()
            if reduce and self.sizes[chunk]:  # the chunks of a barrier are empty
                assert self.into is not None and current is not None
                first, second = (received, current) if received_first else (current, received)
                self.into(first, second, home)
            elif received.data_ptr() != home.data_ptr():
                home.copy_(received)
            self.current[chunk] = home

    def _home(self, chunk: int) -> Tensor:
        home = self.home.get(chunk)
        if home is None:
            home = self.home[chunk] = self.new(self.sizes[chunk])
        return home

    def _buffer(self, receive: int, step: RankRound, scratch: list[Tensor]) -> Tensor:
        """The buffer of a receive: the chunks' home if it is free in this round, else scratch memory."""
        chunks = step.receives[receive][1]
        size = sum(self.sizes[c] for c in chunks)
        if step.once[receive]:
            if not any(c in self.home for c in chunks):
                whole = self.new(size)
                self.home.update(zip(chunks, whole.split([self.sizes[c] for c in chunks]), strict=True))
                return whole
            if all(self._is_free(c, step) for c in chunks):
                homes = joined([self._home(c) for c in chunks])
                if homes is not None:
                    return homes
        free = self.spare.get(size)
        buffer = free.pop() if free else self.new(size)
        scratch.append(buffer)
        return buffer

    def _is_free(self, chunk: int, step: RankRound) -> bool:
        """Whether a chunk's home may be written before the round ends."""
        if self.current.get(chunk) is not self.home.get(chunk):
            return True  # the current value is elsewhere, also for a reduction
        return chunk not in step.sent and chunk not in step.reduced

    def _packed(self, chunks: tuple[int, ...]) -> Tensor:
        """The chunks of one message as one tensor; a view if they are adjacent in memory."""
        parts = [self.current[c] for c in chunks]
        whole = joined(parts)
        return torch.cat(parts) if whole is None else whole


def execute(
    program: RankProgram,
    layout: ChunkLayout,
    source: Tensor | None,
    target: Tensor | None,
    *,
    transport: Transport,
    next_tag: Callable[[], int],
    into: ReduceInto | None = None,
    like: Tensor,
) -> Traffic:
    """Run all rounds on flat tensors; returns this rank's traffic. If `source` is `target` it is changed in place.

    Chunks of `target` that the contract does not promise end with partial results.
    """
    current, home = _pieces(layout.source, source), _pieces(layout.target, target)
    if source is target:
        for chunk, piece in current.items():
            home.setdefault(chunk, piece)
            current[chunk] = home[chunk]
    run = ScheduleRun(transport, into, lambda n: like.new_empty(n), layout.sizes, current, home)
    for step in program.rounds:
        tag = next_tag()
        if step is not None:
            run.round(step, tag)
    for chunk, place in enumerate(layout.target):
        if place is not None and target is not None and run.current[chunk] is not run.home[chunk]:
            run.home[chunk].copy_(run.current[chunk])
    return run.traffic


def _pieces(places: tuple[ChunkRange | None, ...], buffer: Tensor | None) -> dict[int, Tensor]:
    if buffer is None:
        return {}
    return {c: buffer[place[0] : place[1]] for c, place in enumerate(places) if place is not None}
