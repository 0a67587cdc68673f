"""The critical path of a timeline: the chain of spans that its end waited for, and the same in words."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.timeline import Span, Timeline

WAITING = "waiting"
"""The name of a part in which nothing that is drawn runs."""
_SAME_MOMENT = 1e-9
"""Relative to the length of the timeline."""
_MICRO = re.compile(r" m\d+$")
_STAGE = re.compile(r" stage (\d+)$")
_NUMBER = re.compile(r"[ .]\d+(?=[ .]|$)")
_PHASES = ("forward", "backward", "weights", "update")
_WORDS = {
    "F to": "activations to the next stage",
    "B to": "gradients to the previous stage",
    "communication gradients": "reduction of gradients",
    "communication parameters": "gathering of parameters",
    "communication tied": "exchange of tied gradients",
    "communication copies": "copies to and from buckets",
    "communication host": "accumulation on the host",
    "communication loss": "agreement on the loss",
    "communication units": "bookkeeping of sharded units",
}


@dataclass(frozen=True, slots=True)
class PathPart:
    """A span on the critical path, or a time of waiting."""

    name: str
    rank: int
    seconds: float


def critical_path(timeline: Timeline) -> tuple[PathPart, ...]:
    """From the last end back to the start: each part begins when the one before ends. Their seconds add up to all.

    Of several spans that end when one begins, the path takes one of the same rank (computing before sending), else a
    message to its stage, else what has the same name on the nearest rank.
    """
    spans = sorted((s for s in timeline.spans if s.end > s.start), key=lambda s: s.end)
    if not spans:
        return ()
    ends = [s.end for s in spans]
    start, length = min(s.start for s in spans), timeline.seconds
    slack = _SAME_MOMENT * length
    path: list[PathPart] = []
    current, last = None, len(spans) - 1
    moment = ends[last]
    while moment > start + slack:
        first = bisect_left(ends, moment - slack, hi=last + 1)
        ready = [s for s in spans[first : last + 1] if s.start < moment - slack]
        if not ready:  # nothing ends here: wait since the latest end before
            last = first - 1
            before = ends[last] if last >= 0 else start
            path.append(PathPart(WAITING, current.rank if current else spans[-1].rank, moment - before))
            moment = before
            continue
        current = min(ready, key=lambda s: _preference(s, current))
        path.append(PathPart(current.name, current.rank, moment - current.start))
        moment = current.start
        last = bisect_left(ends, moment + slack, hi=last + 1) - 1
    return tuple(reversed(path))


def _preference(s: Span, after: Span | None) -> tuple[int, ...]:
    """Smaller is preferred, as what `after` waited for."""
    if after is None:
        return (s.lane != "compute",)
    stage = _STAGE.search(_MICRO.sub("", after.name))
    to_it = stage is not None and s.name.endswith(f" to stage {stage[1]}")
    far = abs(s.rank - after.rank)
    return (far > 0 and not to_it, far > 0, s.name != after.name, far, s.lane != "compute")


def path_in_words(path: Iterable[PathPart]) -> list[tuple[str, float]]:
    """The path by kind, with seconds, the largest first: `forward of stages 0 to 7`, `all-reduce of gradients`."""
    seconds: dict[str, float] = {}
    stages: dict[str, set[int]] = {}
    for part in path:
        name = _MICRO.sub("", part.name)
        stage = _STAGE.search(name)
        kind = _kind(name[: stage.start()] if stage else name)
        seconds[kind] = seconds.get(kind, 0.0) + part.seconds
        if stage and " to" not in name:
            stages.setdefault(kind, set()).add(int(stage[1]))
    words = [(f"{kind}{_stages(sorted(stages.get(kind, ())))}", s) for kind, s in seconds.items()]
    return sorted(words, key=lambda item: -item[1])


def _kind(name: str) -> str:
    """The kind of work of a span, without its object."""
    if name in _WORDS:
        return _WORDS[name]
    first, _, rest = name.partition(" ")
    if first in _PHASES:
        return "backward for weights" if first == "weights" else first
    if first in ("all-reduce", "reduce-scatter", "all-gather"):
        what = "parameters" if first == "all-gather" else "gradients"
        return f"{first} of {what}"
    if name.startswith("messages of "):
        return "messages of the layers"
    if first == "copy":
        return (
            "copies of parameters from the host" if rest.startswith("all-gather") else "copies of gradients to the host"
        )
    return _NUMBER.sub("", name)


def _stages(numbers: Sequence[int]) -> str:
    """` of stage 3`, ` of stages 0 to 7`, ` of stages 0 and 7`; nothing without a stage."""
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f" of stage {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f" of stages {numbers[0]} to {numbers[-1]}"
    return f" of {len(numbers)} stages"
