"""The parts of a recorded step, read from the names of its spans, to compare with the predicted parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ..core.timeline import Timeline

PARTS = ("forward", "backward", "recompute", "communication", "optimizer", "overhead")
"""The order in which the parts of a step are listed; others follow."""

_PHASE = {
    "recompute": re.compile(r"(?i:recompute|recomputation)(?![a-zA-Z])"),
    "forward": re.compile(r"(?i:forward|fwd)(?![a-zA-Z])|F(?=\d)"),
    "backward": re.compile(r"(?i:backward|bwd|weights)(?![a-zA-Z])|[BW](?=\d)"),
    "optimizer": re.compile(r"(?i:optimizer|update|adamw?|sgd|clip)(?![a-zA-Z])"),
}

Intervals = list[tuple[float, float]]


@lru_cache(maxsize=4096)
def phase_of(lane: str, name: str) -> str:
    """The phase of a span: by its lane, on the compute lane by the first words of its name."""
    if lane != "compute":
        return "data" if lane == "data" else "communication"
    return next((phase for phase, words in _PHASE.items() if words.match(name)), "overhead")


def short_name(name: str) -> str:
    """The name without its phase, which the colour shows: `blocks.3` of `forward blocks.3`, or that phase."""
    name = name.removesuffix(" (model)")
    for words in _PHASE.values():
        match = words.match(name)
        if match and match.end() < len(name) and not name[match.end()].isdigit():
            return name[match.end() :].strip(" :.-/") or name
    return name


def parts_of(timeline: Timeline) -> dict[str, float]:
    """Seconds by part, the mean over ranks; they add up to the length of the timeline.

    Communication is the part not hidden by computation. Overhead is the rest: loading, waiting, unnamed spans.
    """
    start = min((s.start for s in timeline.spans), default=0.0)
    length, ranks = timeline.seconds, timeline.ranks
    total = dict.fromkeys(PARTS, 0.0)
    phases: dict[int, dict[str, Intervals]] = {rank: {} for rank in ranks}
    for s in timeline.spans:
        interval = (s.start - start, s.end - start)
        phases[s.rank].setdefault(phase_of(s.lane, s.name), []).append(interval)
        if s.lane == "compute":
            phases[s.rank].setdefault("computing", []).append(interval)
    for rank, intervals in phases.items():
        covered: Intervals = []
        count = timeline.rank_counts.get(rank, 1)
        for phase in ("recompute", "backward", "forward", "optimizer"):
            # A recomputed forward is inside the backward: time is counted once, for the first phase that claims it.
            before = _length(covered)
            covered = _union(covered + intervals.get(phase, []))
            total[phase] += count * (_length(covered) - before)
        whole = _union(intervals.get("computing", []))
        exposed = _length(_union(whole + intervals.get("communication", []))) - _length(whole)
        total["communication"] += count * exposed
        total["overhead"] += count * (length - _length(covered) - exposed)
    return {k: v / timeline.all_ranks for k, v in total.items() if v > 1e-12 * length}


def idle_share(timeline: Timeline, lane: str = "compute") -> float:
    """The share of the timeline in which a lane is idle, the mean over ranks; overlaps count once."""
    intervals: dict[int, Intervals] = {rank: [] for rank in timeline.ranks}
    for s in timeline.spans:
        if s.lane == lane:
            intervals[s.rank].append((s.start, s.end))
    whole = timeline.all_ranks * timeline.seconds
    busy = sum(timeline.rank_counts.get(rank, 1) * _length(_union(x)) for rank, x in intervals.items())
    return 1 - busy / whole if whole else 0.0


def union_seconds(intervals: Intervals) -> float:
    """The seconds that at least one of the intervals covers."""
    return _length(_union(intervals))


def _union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    joined: Intervals = []
    for a, b in sorted(intervals):
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return joined


def _length(intervals: Intervals) -> float:
    return sum(b - a for a, b in intervals)
