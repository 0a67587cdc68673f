"""The pace of a pipeline that does not drain between batches: seconds per batch, once it is full.

With one micro-batch per batch (pipedream) this is a closed form. Between two F of a stage lie a B and an update, or a
way through later stages and back: from stage s through s+1, ..., t and back takes the forwards and backwards of these
stages and two messages at each boundary, and in that time t-s+1 batches enter. The slowest of all these loops sets the
pace, or a link if a message takes longer. With equal stages and free messages it is f + b + update: there is no bubble.

With several micro-batches per batch (pipedream-2bw) an update interrupts some loops and not others, so some batches are
timed action by action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..schedules import PIPEDREAM, Action, Pipeline, batches_in_flight
from .pipeline_clock import PipelineTimes, TimedAction, time_pipeline

WARM_UP, TIMED = 2, 4
"""Batches of several micro-batches that are timed: until the pipeline is full, and those that count."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds by stage of one micro-batch, of a message to the next stage, and of the update of a batch."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfer: Sequence[float]
    update: Sequence[float]


def sample_batches(name: str, stages: int, micros: int) -> Pipeline:
    """Enough batches that the pipeline is full for some time; `micros` are those of one batch."""
    count = 3 * stages if name == PIPEDREAM else WARM_UP + TIMED
    return batches_in_flight(name, stages, [micros] * count)


def steady_seconds(order: Pipeline, micros: int, seconds: StageSeconds) -> float:
    """Seconds per batch, by the schedule of `sample_batches`."""
    if not order.joint_updates:
        return _slowest_loop(seconds)
    times = _timed(order, seconds)
    ends = {t.action.micro: t.end for t in times.actions if t.action.kind == "U" and t.action.stage == 0}
    last = (WARM_UP + TIMED - 1) * micros - 1  # the last update before the pipeline drains
    first = last - (TIMED - 1) * micros
    return (ends[last] - ends[first]) / (TIMED - 1)


def batch_seconds(order: Pipeline, micros: int, seconds: StageSeconds) -> float:
    """Seconds from a batch's first forward until its last update, in a full pipeline."""
    batch = order.micros // micros // 2
    own = range(batch * micros, (batch + 1) * micros)
    actions = [t for t in _timed(order, seconds).actions if t.action.micro in own]
    return max(t.end for t in actions) - min(t.start for t in actions)


def _slowest_loop(seconds: StageSeconds) -> float:
    """The pace of one micro-batch per batch."""
    stages = range(len(seconds.forward))
    pace = max(seconds.transfer, default=0.0)
    for s in stages:
        loop = seconds.update[s]
        for t in stages[s:]:
            loop += seconds.forward[t] + seconds.backward[t] + (2 * seconds.transfer[t - 1] if t > s else 0.0)
            pace = max(pace, loop / (t - s + 1))
    return pace


def steady_times(order: Pipeline, micros: int, seconds: StageSeconds) -> PipelineTimes:
    """One batch's time in a full pipeline, from the first stage's first forward on.

    What later stages do after that time is what they do at its beginning with the batch before, and is shown there.
    """
    pace = steady_seconds(order, micros, seconds)
    times = _timed(order, seconds)
    batch = order.micros // micros // 2
    lanes = [_lane_of(lane, batch, micros) for lane in order.lanes]
    begin = next(t.start for t in times.actions if t.action == Action("F", 0, batch * micros))
    mine = [t for t in times.actions if t.action in lanes[t.rank]]
    shown = [part for t in mine for part in _wrapped(t, begin, pace)]
    sent = [x for x in times.transfers if x.action in lanes[x.src]]
    moved = [replace(x, start=(x.start - begin) % pace, end=(x.start - begin) % pace + x.end - x.start) for x in sent]
    return PipelineTimes(times.ranks, tuple(sorted(shown, key=lambda t: (t.start, t.end, t.rank))), tuple(moved))


def _timed(order: Pipeline, seconds: StageSeconds) -> PipelineTimes:
    return time_pipeline(
        order,
        forward=seconds.forward,
        backward=seconds.backward,
        transfer=seconds.transfer,
        update=seconds.update,
    )


def _lane_of(lane: Sequence[Action], batch: int, micros: int) -> frozenset[Action]:
    """Spans of a stage from the first forward of a batch until that of the next."""
    starts = [i for i, a in enumerate(lane) if a.kind == "F" and a.micro % micros == 0]
    return frozenset(lane[starts[batch] : starts[batch + 1]])


def _wrapped(timed: TimedAction, begin: float, pace: float) -> list[TimedAction]:
    """An action within one period; in two parts if it crosses the end."""
    start, length = (timed.start - begin) % pace, timed.end - timed.start
    if pace - start < 1e-9 * pace:  # rounding: it begins with the period
        start = 0.0
    end = start + length
    if end <= pace * (1 + 1e-9):
        return [replace(timed, start=start, end=min(end, pace))]
    return [replace(timed, start=start, end=pace), replace(timed, start=0.0, end=end - pace)]
