"""Blocks that a timeline draws: all spans if they are few, else short neighbours as one, then fewer ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..core.timeline import Span, Timeline
from .step_parts import Intervals, phase_of, union_seconds

MOST_RANKS = 16
LEAST_RANKS = 8
"""Ranks that are drawn even if kinds of work that alternate must be drawn as one block for it."""
MOST_SPANS = 6000
"""Per timeline; of more, neighbours too short to see are drawn as one."""
_LEAST_VISIBLE = 1 / 100
"""Share of the width up to which neighbours may be drawn as one while there is another rank to leave out."""
_WIDEST_MIXED = 1 / 40
"""The same for blocks of several kinds of work, while `LEAST_RANKS` are drawn."""
_INVISIBLE = 1 / 1600
"""Share of the width up to which the gaps between neighbours do not matter."""
_FIRST_LENGTH = 1 / 16_000
"""Share of the width that is joined first."""


@dataclass(frozen=True, slots=True)
class Block:
    """A span as it is drawn, or several short ones whose kinds of work share its height."""

    start: float
    end: float
    parts: tuple[tuple[Span, float], ...]
    """For each kind of work a span from `start` to `end`, and the share of this time that it takes."""

    @classmethod
    def of(cls, span: Span) -> Block:
        """A block of one span."""
        return cls(span.start, span.end, ((span, 1.0),))

    @property
    def rank(self) -> int:
        """The rank of its spans."""
        return self.parts[0][0].rank

    @property
    def lane(self) -> str:
        """The lane of its spans."""
        return self.parts[0][0].lane

    @property
    def mixed(self) -> bool:
        """Whether its heights are shares of time."""
        return len(self.parts) > 1 or self.parts[0][1] < 1.0


def select_blocks(timeline: Timeline, scale: float, most: int) -> tuple[Block, ...]:
    """At most about `most` spans: neighbours of one kind too short to see are one, then ranks are left out down to
    `LEAST_RANKS`, then alternating kinds are one block, then more ranks are left out, then the rest is joined."""
    for ranks in (MOST_RANKS, LEAST_RANKS):
        spans = _spans_of(timeline, ranks)
        merged = _merged(spans, scale, most, scale * _LEAST_VISIBLE)
        if len(merged) <= most:
            return tuple(map(Block.of, merged))
    while True:
        blocks = _mixed_until(spans, scale, most)
        if sum(len(b.parts) for b in blocks) <= most:
            return blocks
        if ranks == 1:
            return tuple(map(Block.of, _merged(spans, scale, most, 4.0 * scale)))
        ranks //= 2
        spans = _spans_of(timeline, ranks)


def chosen_ranks(ranks: tuple[int, ...], most: int) -> set[int]:
    """All ranks, or some spread evenly, so that pipeline stages of all places are shown."""
    n = len(ranks)
    if n <= most:
        return set(ranks)
    return {ranks[round(i * (n - 1) / max(1, most - 1))] for i in range(most)}


def _spans_of(timeline: Timeline, most: int) -> list[Span]:
    """The spans of the chosen ranks, lane by lane, in order."""
    own = chosen_ranks(timeline.ranks, most)
    return sorted((s for s in timeline.spans if s.rank in own), key=lambda s: (s.rank, s.lane, s.start, -s.end))


# ---- spans of one kind


def _near(last: Span, s: Span, least: float, scale: float) -> bool:
    """Whether two neighbours may be one: together short, and mostly busy unless they are too short to see."""
    length = s.end - last.start
    return length < least and (length < _INVISIBLE * scale or s.start - last.end <= 0.7 * length)


def _merged(spans: list[Span], scale: float, most: int, longest: float) -> tuple[Span, ...]:
    """The spans, with short neighbours of one phase joined until there are few enough, or the joined ones would be
    longer than `longest`."""
    least = scale * _FIRST_LENGTH
    counts = [1] * len(spans)
    while len(spans) > most:
        joined: list[Span] = []
        sizes: list[int] = []
        for s, k in zip(spans, counts, strict=True):
            last = joined[-1] if joined else None
            if (
                last
                and (last.rank, last.lane) == (s.rank, s.lane)
                and _near(last, s, least, scale)
                and phase_of(last.lane, last.name) == phase_of(s.lane, s.name)
            ):
                joined[-1] = dataclasses.replace(last, end=max(last.end, s.end), bytes=last.bytes + s.bytes)
                sizes[-1] += k
            else:
                joined.append(s)
                sizes.append(k)
        spans, counts, least = joined, sizes, least * 1.5
        if least > longest:
            break
    return tuple(_counted(s, k) for s, k in zip(spans, counts, strict=True))


def _counted(first: Span, count: int) -> Span:
    return first if count == 1 else dataclasses.replace(first, name=f"{first.name} and {count - 1} more")


# ---- kinds that alternate


def _mixed_until(spans: list[Span], scale: float, most: int) -> tuple[Block, ...]:
    """Blocks of neighbours of all kinds, the shortest that are few enough; or the longest."""
    least = scale * _INVISIBLE
    while True:
        blocks = tuple(_block(own) for own in _clusters(spans, least))
        least *= 1.5
        if sum(len(b.parts) for b in blocks) <= most or least > scale * _WIDEST_MIXED:
            return blocks


def _clusters(spans: Sequence[Span], longest: float) -> Iterator[list[Span]]:
    """Neighbours of a lane that are together no longer than that, and every longer span alone."""
    for _, lane in groupby(spans, key=lambda s: (s.rank, s.lane)):
        own: list[Span] = []
        end = 0.0
        for s in lane:
            if own and max(end, s.end) - own[0].start > longest:
                yield own
                own, end = [], 0.0
            own.append(s)
            end = max(end, s.end)
        yield own


def _block(own: Sequence[Span]) -> Block:
    """One block, with the time of each kind of work as its share of the height."""
    if len(own) == 1:
        return Block.of(own[0])
    start, end = own[0].start, max(s.end for s in own)
    by_kind: dict[str, list[Span]] = {}
    for s in own:
        by_kind.setdefault(phase_of(s.lane, s.name), []).append(s)
    parts = []
    for _, spans in sorted(by_kind.items(), reverse=True):  # forward above backward, as they are listed
        times: Intervals = [(s.start, s.end) for s in spans]
        share = union_seconds(times) / (end - start) if end > start else 1.0
        whole = dataclasses.replace(spans[0], start=start, end=end, bytes=sum(s.bytes for s in spans))
        parts.append((_counted(whole, len(spans)), min(1.0, share)))
    return Block(start, end, tuple(parts))
