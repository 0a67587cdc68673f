"""The parts of a recorded step, read from the names of its spans, so that they stand beside the predicted parts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..core.timeline import Timeline

PARTS = ("forward", "backward", "recompute", "communication", "optimizer", "overhead")
"""The order in which parts of a step are listed; others follow."""

_PHASE = {
    "recompute": re.compile(r"(?i:recompute|recomputation)(?![a-zA-Z])"),
    "forward": re.compile(r"(?i:forward|fwd)(?![a-zA-Z])|F(?=\d)"),
    "backward": re.compile(r"(?i:backward|bwd)(?![a-zA-Z])|[BW](?=\d)"),
    "optimizer": re.compile(r"(?i:optimizer|update|adamw?|sgd|clip)(?![a-zA-Z])"),
}

Pieces = list[tuple[float, float]]


def phase_of(lane: str, name: str) -> str:
    """What a span counts as: by its lane, and on the compute lane by the first words of its name."""
    if lane != "compute":
        return "data" if lane == "data" else "communication"
    return next((phase for phase, words in _PHASE.items() if words.match(name)), "overhead")


def short_name(name: str) -> str:
    """The name without the phase that its colour tells: `forward blocks.3` is `blocks.3`."""
    for words in _PHASE.values():
        found = words.match(name)
        if found and found.end() < len(name) and not name[found.end()].isdigit():
            return name[found.end() :].strip(" :.-/") or name
    return name


def parts_of(timeline: Timeline) -> dict[str, float]:
    """Seconds by part, the mean over ranks; their sum is the length of the timeline. Communication is what computation
    does not hide; overhead is the rest: loading, waiting, and what has no name of a phase."""
    start = min((s.start for s in timeline.spans), default=0.0)
    length, ranks = timeline.seconds, timeline.ranks
    total = dict.fromkeys(PARTS, 0.0)
    phases: dict[int, dict[str, Pieces]] = {rank: {} for rank in ranks}
    for s in timeline.spans:
        piece = (s.start - start, s.end - start)
        phases[s.rank].setdefault(phase_of(s.lane, s.name), []).append(piece)
        if s.lane == "compute":
            phases[s.rank].setdefault("computing", []).append(piece)
    for pieces in phases.values():
        covered: Pieces = []
        for phase in ("recompute", "backward", "forward", "optimizer"):
            # A recomputed forward lies inside the backward: what the first claims, the next does not count again.
            before = _length(covered)
            covered = _union(covered + pieces.get(phase, []))
            total[phase] += _length(covered) - before
        whole = _union(pieces.get("computing", []))
        exposed = _length(_union(whole + pieces.get("communication", []))) - _length(whole)
        total["communication"] += exposed
        total["overhead"] += length - _length(covered) - exposed
    return {k: v / len(ranks) for k, v in total.items() if v > 1e-12 * length} if ranks else {}


def idle_share(timeline: Timeline, lane: str = "compute") -> float:
    """The share of the timeline during which a lane does nothing, the mean over ranks; overlaps count once."""
    pieces: dict[int, Pieces] = {rank: [] for rank in timeline.ranks}
    for s in timeline.spans:
        if s.lane == lane:
            pieces[s.rank].append((s.start, s.end))
    whole = len(pieces) * timeline.seconds
    return 1 - sum(_length(_union(x)) for x in pieces.values()) / whole if whole else 0.0


def _union(pieces: Iterable[tuple[float, float]]) -> Pieces:
    joined: Pieces = []
    for a, b in sorted(pieces):
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return joined


def _length(pieces: Pieces) -> float:
    return sum(b - a for a, b in pieces)
