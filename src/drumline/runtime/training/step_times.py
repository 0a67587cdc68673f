"""Splits a recorded step of one rank into its own work by phase and the time in which it waited for messages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.timeline import Span
    from ..state.recorder import StepRecorder

PHASES = ("data", "forward", "backward", "optimizer", "network", "between phases")
"""Own work of a rank. `network` is what it does around messages; `between phases` also counts what it does between two
steps: logging, saving, the interpreter."""
WAIT = len(PHASES)
"""The position of the wait in a row of times."""
_TAIL = 0.05
"""A message that ends this close to the end of its phase, as a share of the phase, is what the phase waited for."""

Interval = tuple[float, float]


def recorded_times(record: StepRecorder, number: int, *, pipelined: bool) -> list[float]:
    """Seconds of a recorded step by phase, and last the wait; zeros if it was not recorded."""
    return step_times(
        record.spans(number), record.blocked_spans(number), gap=record.gap_before(number), pipelined=pipelined
    )


def step_times(
    spans: Sequence[Span], blocked: Sequence[Interval] = (), *, gap: float = 0.0, pipelined: bool = False
) -> list[float]:
    """Seconds by phase, and last the wait, from the spans of a step.

    A rank waits in a message that lasts until its phase ends, and wherever its thread was `blocked` by one. In a
    pipeline it waits between the phases, each of which is one action. `gap` is the time between two steps.
    """
    times = dict.fromkeys(PHASES, 0.0)
    phases = sorted((s for s in spans if s.lane != "communication"), key=lambda s: s.start)
    if not phases:
        return [0.0] * (WAIT + 1)
    messages = sorted((s.start, s.end) for s in spans if s.lane == "communication")
    blocked = sorted(blocked)
    waited = 0.0
    for s in phases:
        waits = messages if s.name == "communication" else [*_begun(blocked, s), *_tail(messages, s)]
        length = _length(_inside(waits, s))
        name = "network" if s.name == "communication" else s.name
        times[name if name in times else "between phases"] += s.end - s.start - length
        waited += length
    between = phases[-1].end - min(0.0, phases[0].start) - sum(s.end - s.start for s in phases)
    if pipelined:
        waited += max(0.0, between)
    times["between phases"] += gap + (0.0 if pipelined else max(0.0, between))
    return [*times.values(), waited]


def _tail(messages: Sequence[Interval], phase: Span) -> list[Interval]:
    """The wait at the end of a phase: from the start of the last message in it, if that lasts until the end."""
    begun = _begun(messages, phase)
    if not begun or begun[-1][1] < phase.end - _TAIL * (phase.end - phase.start):
        return []
    return [(begun[-1][0], phase.end)]


def _begun(intervals: Sequence[Interval], phase: Span) -> Sequence[Interval]:
    """Those that begin in a phase, of intervals in order; a step may have thousands."""
    return intervals[bisect_left(intervals, (phase.start,)) : bisect_right(intervals, (phase.end, float("inf")))]


def _inside(intervals: Iterable[Interval], phase: Span) -> list[Interval]:
    cut = ((max(a, phase.start), min(b, phase.end)) for a, b in intervals)
    return [(a, b) for a, b in cut if a < b]


def _length(intervals: Iterable[Interval]) -> float:
    """The time covered by intervals, which may overlap."""
    total, until = 0.0, float("-inf")
    for a, b in sorted(intervals):
        total += max(0.0, b - max(a, until))
        until = max(until, b)
    return total
