"""Critical paths of two timelines of one step, aligned: which share of the step waits for the same work in both.

A critical path is a chain of work (a phase of a micro-batch on a rank: forward, backward, optimizer) in which each
piece waits for the one before, with the waits between them. Two paths are aligned like two texts: the largest common
subsequence counts, each piece with its share of its step. So a step that is slower everywhere, or in one place, has the
same path; work that is on one path alone counts against it with its share, and so does a wait as far as it is longer
than the same wait of the other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

TIE = 0.02
"""Share of the step: a chain is critical, too, if it is shorter than the longest by up to that. Where stages are
balanced, several chains are, and which of them is the longest changes from step to step."""
OVERLAP = 0.01
"""Share of the step by which work may begin before the end of what it waits for, as clocks and records differ."""
CONTIGUOUS = 1e-5
"""Seconds between two recorded spans of one phase up to which they are of one micro-batch."""
_MICRO = re.compile(r" m(\d+)$")
_WEIGHTS = re.compile(r"weights\b")
_STAGE = re.compile(r" stage (\d+)\b")
_PHASES = ("forward", "backward", "optimizer", "communication")

Key = tuple[int, str, int]
"""The first of the ranks that do the same, the phase, and how often the rank had done it before: its micro-batch, if it
has one stage and does not split the backward. A record calls both parts of a split backward backward."""


@dataclass(slots=True)
class _Work:
    """One phase of one micro-batch on one rank."""

    rank: int
    phase: str
    label: str
    start: float
    end: float
    micro: int


@dataclass(slots=True)
class PathNode:
    """Work on a critical path, or the start or the end of the step."""

    key: Key
    start: float
    end: float
    """Shares of the step."""
    before: list[int] = field(default_factory=list)
    """What it waited for, on a path that is critical: indices of earlier nodes."""
    slack: float = float("inf")
    """By how much it may be later before the step ends later."""


Skipped = tuple[tuple[Key, float], ...]
"""Work on one path that is not aligned with the other, with its share of the step."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """The common part of two critical paths."""

    measured: float = 0.0
    simulated: float = 0.0
    """Shares of each step that the aligned pieces take."""
    equally_long: float = 0.0
    """The share in which they also take the same share of their steps: at most either of the two."""
    only_measured: Skipped = ()
    only_simulated: Skipped = ()

    @property
    def moved(self) -> float:
        """The share of work that both paths have, in another order."""
        ours, theirs = dict(self.only_measured), dict(self.only_simulated)
        return sum(min(share, theirs[key]) for key, share in ours.items() if key in theirs)

    @property
    def agreement(self) -> float:
        """The smaller share, as what one path alone has counts against both, without what they have in another order.

        That is wrong in two places: where one path has it, and where the other has it.
        """
        return max(0.0, min(self.measured, self.simulated) - self.moved)


def agreement(measured: Any, simulated: Any) -> float:
    """The share of the step in which both critical paths have the same work in the same order, or the same wait."""
    return align(measured, simulated).agreement


def align(measured: Any, simulated: Any) -> Alignment:
    """Align the critical paths of two timelines; of several paths within `TIE`, those that agree the most.

    Ranks that the simulation treats alike count as one.
    """
    alike = equal_ranks(simulated)
    sources = message_sources(simulated, alike)
    ours, theirs = (critical_nodes(timeline, alike, sources) for timeline in (measured, simulated))
    best: dict[tuple[int, int], Alignment] = {}
    for i, a in enumerate(ours):
        for j, b in enumerate(theirs):
            options = [_skip(best[p, j], measured=(a.key, _work(ours[p], a))) for p in a.before]
            options += [_skip(best[i, q], simulated=(b.key, _work(theirs[q], b))) for q in b.before]
            if a.key == b.key:
                options += [_match(best[p, q], (ours[p], a), (theirs[q], b)) for p in a.before for q in b.before]
            best[i, j] = max(options, key=lambda x: (x.measured + x.simulated, x.agreement), default=Alignment())
    return best[len(ours) - 1, len(theirs) - 1]


def _skip(
    x: Alignment, *, measured: tuple[Key, float] | None = None, simulated: tuple[Key, float] | None = None
) -> Alignment:
    """One more piece on one path alone."""
    ours, theirs = ((piece,) if piece else () for piece in (measured, simulated))
    return replace(x, only_measured=x.only_measured + ours, only_simulated=x.only_simulated + theirs)


def _match(x: Alignment, ours: tuple[PathNode, PathNode], theirs: tuple[PathNode, PathNode]) -> Alignment:
    """One more piece on both, and the wait before it as far as both have it."""
    wait, a, b = min(_wait(*ours), _wait(*theirs)), _work(*ours), _work(*theirs)
    return replace(
        x,
        measured=x.measured + a + wait,
        simulated=x.simulated + b + wait,
        equally_long=x.equally_long + min(a, b) + wait,
    )


def _work(before: PathNode, after: PathNode) -> float:
    return after.end - max(after.start, before.end)


def _wait(before: PathNode, after: PathNode) -> float:
    return max(0.0, after.start - before.end)


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


def message_sources(simulated: Any, alike: Mapping[int, int]) -> dict[Key, Key]:
    """Passes of stages that wait for a message of another rank, and the pass that sends it.

    A forward waits for that of the stage before, a backward for that of the stage behind, of the same micro-batch.
    """
    passes: dict[tuple[str, int, int], Key] = {}
    for w in _works(simulated):
        stage, micro = _STAGE.search(w.label), _MICRO.search(w.label)
        if stage and micro and not _WEIGHTS.match(w.label):
            passes[w.phase, int(stage[1]), int(micro[1])] = (alike[w.rank], w.phase, w.micro)
    found = {
        key: passes.get((phase, stage + (1 if phase == "backward" else -1), micro))
        for (phase, stage, micro), key in passes.items()
    }
    return {key: source for key, source in found.items() if source and source[0] != key[0]}


def critical_nodes(timeline: Any, alike: Mapping[int, int], sources: Mapping[Key, Key]) -> list[PathNode]:
    """All that the end of the step waits for, within `TIE`; nothing comes before what it waits for.

    The first node is the start of the step, the last its end, which waits for the last work of every rank.
    """
    start, length = min(s.start for s in timeline.spans), timeline.seconds
    works = sorted(_works(timeline), key=lambda w: (w.end, w.start))
    nodes = [PathNode((-1, "start", 0), 0.0, 0.0)]
    for w in works:
        key = alike.get(w.rank, w.rank), w.phase, w.micro
        nodes.append(PathNode(key, (w.start - start) / length, (w.end - start) / length))
    nodes.append(PathNode((-1, "end", 0), 1.0, 1.0))
    waits = {i: _awaited(works, i - 1, alike, sources) or [0] for i in range(1, len(works) + 1)}
    last = {w.rank: i for i, w in enumerate(works, 1)}
    waits[len(nodes) - 1] = sorted(last.values())
    nodes[-1].slack = 0.0
    for i in range(len(nodes) - 1, 0, -1):
        latest = max(nodes[k].end for k in waits[i])
        for k in waits[i]:
            later = nodes[i].slack + latest - nodes[k].end
            if later <= TIE:
                nodes[i].before.append(k)
                nodes[k].slack = min(nodes[k].slack, later)
    kept = [i for i, node in enumerate(nodes) if node.slack <= TIE]
    place = {i: k for k, i in enumerate(kept)}
    for i in kept:
        nodes[i].before = [place[k] for k in nodes[i].before]
    return [nodes[i] for i in kept]


def _awaited(works: Sequence[_Work], i: int, alike: Mapping[int, int], sources: Mapping[Key, Key]) -> list[int]:
    """Numbers, from 1 on, of the work that this waited for.

    It is the rank's own work before, and what sends a message to it; before an optimizer it is that of all ranks.
    """
    current, before = works[i], {}
    latest = current.start + OVERLAP * (works[-1].end - min(w.start for w in works))
    leader = alike.get(current.rank, current.rank)
    source = sources.get((leader, current.phase, current.micro))
    sender = source and (source[0] + current.rank - leader, *source[1:])
    for k, w in enumerate(works[:i], 1):
        sent = w.rank == current.rank or current.phase == "optimizer" or (w.rank, w.phase, w.micro) == sender
        if sent and w.start < current.start and w.end <= latest:
            before[w.rank] = k
    return sorted(before.values())


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
