"""The outcome of replaying workers that do not wait for each other, and what it is read from: their activities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core.timeline import Span, Timeline

WARM_UP = 0.25
"""Share of the updates that are not counted: until then workers have fallen into their pattern."""


@dataclass(frozen=True, slots=True)
class WorkerReplay:
    """Replayed steps of a plan: throughput, waiting and staleness after the warm-up."""

    updates: int
    """Optimizer steps that were counted."""
    step_seconds: float
    """Seconds between two of them."""
    samples_per_second: float
    """Of gradients that were applied."""
    waiting: tuple[float, ...]
    """By worker, the share of its time in which it neither computes nor sends or receives."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Gradients by the number of updates between reading and applying."""
    dropped: int = 0
    """Gradients that came too late."""
    server_use: Mapping[str, float] = field(default_factory=dict)
    """Share of the time in which the servers `receive`, `update` and `send`."""
    timeline: Timeline = field(default_factory=lambda: Timeline("predicted"))
    """A step in the middle of the replay, or as many as there are workers where each makes updates of its own."""

    @property
    def mean_staleness(self) -> float:
        """Over all gradients."""
        count = sum(self.staleness.values())
        return sum(k * n for k, n in self.staleness.items()) / count if count else 0.0

    @property
    def slowest(self) -> int:
        """The worker that waits the least: the others wait for it."""
        return min(range(len(self.waiting)), key=lambda w: self.waiting[w])


@dataclass(slots=True)
class ReplayLog:
    """Activities of workers and servers, and the times of updates."""

    workers: int
    spans: list[Span] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    """When each update was complete."""
    staleness: list[list[int]] = field(default_factory=list)
    """By update, of its gradients."""

    def add(self, rank: int, lane: str, name: str, start: float, end: float, size: float = 0.0) -> None:
        """An activity; one that takes no time is left out."""
        if end > start:
            self.spans.append(Span(rank, lane, name, start, end, size))

    def counted(self) -> tuple[int, int]:
        """The first and the last update that count."""
        last = len(self.updates) - 1
        return min(int(WARM_UP * last), max(0, last - 1)), last

    def busy(self, start: float, end: float) -> dict[int, float]:
        """Seconds of each rank's activities in a window; those of one rank do not overlap."""
        seconds: dict[int, float] = {}
        for s in self.spans:
            inside = min(s.end, end) - max(s.start, start)
            if inside > 0:
                seconds[s.rank] = seconds.get(s.rank, 0.0) + inside
        return seconds

    def waiting(self, start: float, end: float) -> tuple[float, ...]:
        """By worker, the share of a window without an activity."""
        busy, length = self.busy(start, end), end - start
        return tuple(max(0.0, 1 - busy.get(w, 0.0) / length) if length else 0.0 for w in range(self.workers))

    def histogram(self, first: int, last: int) -> dict[int, int]:
        """Gradients by staleness, of the updates after `first` up to `last`."""
        return dict(sorted(Counter(s for update in self.staleness[first + 1 : last + 1] for s in update).items()))

    def window(self, start: float, end: float, notes: Sequence[str] = ()) -> Timeline:
        """The activities between two times, cut at both ends and moved to 0."""
        cut = [
            Span(s.rank, s.lane, s.name, max(s.start, start) - start, min(s.end, end) - start, s.bytes)
            for s in self.spans
            if min(s.end, end) > max(s.start, start)
        ]
        return Timeline("predicted", tuple(cut), tuple(notes))


def stretched(timeline: Timeline, speed: float) -> Timeline:
    """The timeline on a machine that runs at a share of its measured speed."""
    if speed == 1.0:
        return timeline
    spans = (Span(s.rank, s.lane, s.name, s.start / speed, s.end / speed, s.bytes) for s in timeline.spans)
    return Timeline(timeline.origin, tuple(spans), timeline.notes, timeline.rank_counts)
