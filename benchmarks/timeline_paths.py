"""Critical paths of two timelines of one step, laid over each other: in which share of the step they are the same.

A path says for every moment of the step which rank does the work that the end waits for: its phase (forward, backward,
optimizer) and its micro-batch. Where no rank computes, it says which rank waits, for a message or for another reason.
Both timelines are scaled to length 1, so a step that is slower everywhere has the same path.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

LONGEST_GAP = 0.01
"""Share of the step; a rank that does nothing for longer waits for another."""
CONTIGUOUS = 1e-5
"""Seconds between two recorded spans of one phase up to which they are of one micro-batch."""
_MICRO = re.compile(r" m(\d+)$")
_WEIGHTS = re.compile(r"weights\b")
_STAGE = re.compile(r" stage (\d+)\b")
_PHASES = ("forward", "backward", "optimizer", "communication")


@dataclass(frozen=True, slots=True)
class PathPiece:
    """What the end of the step waits for during one part of it."""

    start: float
    end: float
    """Shares of the step."""
    rank: int
    """The first of the ranks that do the same."""
    phase: str
    """forward, backward, optimizer, overhead; communication or waiting where no rank computes."""
    micro: int
    """How often the rank had done this phase before: its micro-batch, if it has one stage and does not split the
    backward. A record calls both parts of a split backward backward. 0 where no rank computes."""


@dataclass(slots=True)
class _Work:
    """One phase of one micro-batch on one rank."""

    rank: int
    phase: str
    label: str
    start: float
    end: float
    micro: int


def agreement(measured: Any, simulated: Any) -> float:
    """The share of the step in which both critical paths are at the same work.

    Ranks that the simulation treats alike count as one. Where stages are balanced, several chains of work end at the
    same time: it is enough that one of them is the same.
    """
    alike = equal_ranks(simulated)
    ours, theirs = critical_pieces(measured, alike), critical_pieces(simulated, alike)
    moments = sorted({moment for piece in (*ours, *theirs) for moment in (piece.start, piece.end)})
    stretches = [x for x in pairwise(moments) if _work_in(ours, *x) & _work_in(theirs, *x)]
    return sum(end - begin for begin, end in stretches)


def equal_ranks(timeline: Any) -> dict[int, int]:
    """Every rank with the first one that does the same at the same times."""
    first: dict[Any, int] = {}
    alike = {}
    for rank in timeline.ranks:
        own = tuple(sorted((s.lane, s.name, s.start, s.end) for s in timeline.spans if s.rank == rank))
        leader = first.setdefault(own, rank)
        for other in range(rank, rank + timeline.rank_counts.get(rank, 1)):
            alike[other] = leader
    return alike


def critical_pieces(timeline: Any, alike: Mapping[int, int]) -> list[PathPiece]:
    """All that the end of the step waits for, by start; together they cover the step.

    The path is followed back from the work that ends last: to the rank's own work before; where the rank did nothing
    for longer than `LONGEST_GAP`, to the work of any rank that ended last before; and to work of the same phase that
    ended on another rank just then, from which a message may have come.
    """
    works = sorted(_works(timeline), key=lambda w: w.end)
    messages = [(s.start, s.end) for s in timeline.spans if _phase(s) == "communication"]
    start, length = min(s.start for s in timeline.spans), timeline.seconds
    pieces: set[PathPiece] = set()

    def add(begin: float, end: float, rank: int, phase: str = "", micro: int = 0) -> None:
        if end > begin:
            phase, rank = phase or _gap(begin, end, messages), alike.get(rank, rank)
            pieces.add(PathPiece((begin - start) / length, (end - start) / length, rank, phase, micro))

    add(works[-1].end, start + length, works[-1].rank)
    waiting, seen = [works[-1]], {id(works[-1])}
    while waiting:
        current = waiting.pop()
        add(current.start, current.end, current.rank, current.phase, current.micro)
        before = _awaited(current, works, LONGEST_GAP * length)
        add(max((w.end for w in before), default=start), current.start, current.rank)
        waiting += [w for w in before if id(w) not in seen]
        seen |= {id(w) for w in before}
    return sorted(pieces, key=lambda piece: (piece.start, piece.end, piece.rank))


def _awaited(current: _Work, works: Sequence[_Work], slack: float) -> list[_Work]:
    """The work that this one waited for."""
    before = [w for w in works if w.start < current.start and w.end <= current.start + slack]
    if not before:
        return []
    own = max((w for w in before if w.rank == current.rank), key=lambda w: w.end, default=None)
    idle = own is None or current.start - own.end > slack
    first = max(before, key=lambda w: w.end) if idle or own is None else own
    sent = [w for w in before if w.rank != current.rank and w.phase == current.phase]
    return [first, *(w for w in sent if w is not first and w.end >= current.start - slack)]


def _work_in(pieces: Sequence[PathPiece], begin: float, end: float) -> set[tuple[int, str, int]]:
    """Rank, phase and micro-batch of the pieces that cover a stretch of the step."""
    return {(p.rank, p.phase, p.micro) for p in pieces if p.start <= begin and p.end >= end}


def _gap(begin: float, end: float, messages: list[tuple[float, float]]) -> str:
    """Whether a message was under way while no rank of the path computed."""
    return "communication" if any(a < end and b > begin for a, b in messages) else "waiting"


def _works(timeline: Any) -> list[_Work]:
    """The compute lanes: spans of one phase of one micro-batch are joined, and numbered by rank and phase.

    A simulation names the micro-batch if there are several; a record does not, but its spans of one phase follow each
    other without a gap.
    """
    works: list[_Work] = []
    seen: Counter[tuple[int, str]] = Counter()
    last: dict[int, _Work] = {}
    for s in sorted(timeline.spans, key=lambda s: (s.rank, s.start)):
        phase = _phase(s)
        if s.lane != "compute" or phase == "communication":
            continue
        before, label = last.get(s.rank), _label(s.name)
        joined = before is not None and (before.phase, before.label) == (phase, label)
        if joined and timeline.origin == "measured":
            joined = s.start - before.end <= CONTIGUOUS
        if joined:
            before.end = max(before.end, s.end)
        else:
            last[s.rank] = _Work(s.rank, phase, label, s.start, s.end, seen[s.rank, phase])
            works.append(last[s.rank])
            seen[s.rank, phase] += 1
    return works


def _phase(span: Any) -> str:
    """The phase of a span; gradients of weights and the bookkeeping of sharded units are recorded as backward."""
    if span.lane != "compute":
        return "data" if span.lane == "data" else "communication"
    first = span.name.split()[0]
    if first == "weights" or span.name == "communication units":
        return "backward"
    return first if first in _PHASES else "overhead"


def _label(name: str) -> str:
    """Stage and micro-batch, as far as the name has them, and which part of a split backward it is."""
    return "".join(match[0] for match in (_WEIGHTS.match(name), _STAGE.search(name), _MICRO.search(name)) if match)
