"""The clock of a pipeline schedule: when each action starts and ends, and its bubble in closed form.

Every rank runs its actions in order, each as soon as its inputs have arrived. Messages to another rank travel while it
computes, one after the other on each link in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import InputError
from ..schedules import ASYNCHRONOUS, Action, Pipeline, check_order, check_skips, pipeline_order

Durations = float | Sequence[float]
"""Seconds: the same for all stages (or boundaries), or one number for each."""

_Actions = list["TimedAction"]
_Transfers = list["StageTransfer"]


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action and when a rank runs it."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """The result of an action on its way to a stage of another rank."""

    src: int
    dst: int
    action: Action
    stage: int
    """The stage that receives it."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """A pipeline schedule with its times."""

    ranks: int
    actions: tuple[TimedAction, ...]
    """By start."""
    transfers: tuple[StageTransfer, ...]
    """By start."""

    @property
    def seconds(self) -> float:
        """Until the last action ends."""
        return max((timed.end for timed in self.actions), default=0.0)

    @property
    def longest_rank_seconds(self) -> float:
        """From the first action of a rank to its last: the step, if ranks do not wait for each other between steps."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for timed in self.actions:
            first[timed.rank] = min(timed.start, first.get(timed.rank, timed.start))
            last[timed.rank] = max(timed.end, last.get(timed.rank, timed.end))
        return max((last[rank] - first[rank] for rank in first), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(timed.end - timed.start for timed in self.actions if timed.rank == rank)

    @property
    def bubble(self) -> float:
        """The share of the time in which ranks do not compute."""
        whole = self.ranks * self.seconds
        return 1 - sum(timed.end - timed.start for timed in self.actions) / whole if whole else 0.0


def time_pipeline(
    pipeline: Pipeline,
    *,
    forward: Durations,
    backward: Durations,
    weight: Durations = 0.0,
    transfer: Durations = 0.0,
    skips: Mapping[tuple[int, int], float] | None = None,
    update: Durations = 0.0,
) -> PipelineTimes:
    """Time every action of a schedule. Durations are per micro-batch and stage, transfers per boundary between stages.

    Where the schedule has W actions, `backward` is the part for the input and `weight` the part for the weights.
    `skips` are values that a stage sends directly to a later one, with their seconds. `update` is for U actions.
    """
    stages = pipeline.stages
    given = {"F": ("forward", forward), "B": ("backward", backward), "W": ("weight", weight), "U": ("update", update)}
    seconds = {kind: _each(word, durations, stages, "stage") for kind, (word, durations) in given.items()}
    routes = {(s, s + 1): t for s, t in enumerate(_each("transfer", transfer, stages - 1, "boundary"))}
    check_skips(tuple(skips or ()), stages)
    _each("skip", tuple((skips or {}).values()), len(skips or ()), "skip")
    actions: _Actions = []
    transfers: _Transfers = []
    _run(pipeline, pipeline.homes(), seconds, routes | dict(skips or {}), actions, transfers)
    actions.sort(key=lambda timed: (timed.start, timed.end, timed.rank))
    transfers.sort(key=lambda sent: (sent.start, sent.end, sent.src))
    return PipelineTimes(len(pipeline.lanes), tuple(actions), tuple(transfers))


def end_seconds(
    pipeline: Pipeline,
    homes: dict[int, int],
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    transfer: Sequence[float],
) -> float:
    """Seconds until the last action ends: `time_pipeline` without its record, for a search that asks often.

    `homes` are those of the schedule, which drains after every batch.
    """
    seconds = {"F": forward, "B": backward, "W": weight}
    return _run(pipeline, homes, seconds, {(s, s + 1): t for s, t in enumerate(transfer)})


def _run(
    pipeline: Pipeline,
    homes: dict[int, int],
    seconds: Mapping[str, Sequence[float]],
    routes: Mapping[tuple[int, int], float],
    actions: _Actions | None = None,
    transfers: _Transfers | None = None,
) -> float:
    """Let each rank go on as far as its inputs allow, until all are at their end.

    Times do not depend on the order in which ranks are visited: a link is fed by one rank alone, in its order.
    """
    stages, micros = range(pipeline.stages), pipeline.micros
    receivers: dict[str, list[list[tuple[int, float]]]] = {kind: [[] for _ in stages] for kind in "FBWU"}
    for (a, b), t in sorted(routes.items()):  # the neighbour first
        receivers["F"][a].append((b, t))
    for (a, b), t in sorted(routes.items(), reverse=True):
        receivers["B"][b].append((a, t))
    missing = {kind: [[len(receivers[back][s])] * micros for s in stages] for kind, back in (("F", "B"), ("B", "F"))}
    arrived = {kind: [[0.0] * micros for _ in stages] for kind in "FB"}
    ended = {kind: [[-1.0] * micros for _ in stages] for kind in "FBWU"}
    link_free: dict[tuple[int, int], float] = {}
    lanes = [[(a.kind, a.stage, a.micro) for a in lane] for lane in pipeline.lanes]
    place, clock = [0] * len(lanes), [0.0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(lanes):
            i, now = place[rank], clock[rank]
            while i < len(lane):
                kind, s, m = lane[i]
                own = 0.0 if kind == "F" else ended["F" if kind == "B" else "B"][s][m]
                if kind == "U" and pipeline.joint_updates:
                    first = ended["B"][0][m]
                    own = max(own, first) if own >= 0 and first >= 0 else -1.0
                if own < 0 or (kind in "FB" and missing[kind][s][m]):
                    break
                start = max(now, own, arrived[kind][s][m]) if kind in "FB" else max(now, own)
                now = ended[kind][s][m] = start + seconds[kind][s]
                if actions is not None:
                    actions.append(TimedAction(rank, pipeline.lanes[rank][i], start, now))
                for other, t in receivers[kind][s]:
                    home, sent = homes.get(other, rank), now
                    if home != rank:
                        begin = max(now, link_free.get((rank, home), 0.0))
                        sent = link_free[rank, home] = begin + t
                        if transfers is not None:
                            transfers.append(StageTransfer(rank, home, pipeline.lanes[rank][i], other, begin, sent))
                    missing[kind][other][m] -= 1
                    arrived[kind][other][m] = max(arrived[kind][other][m], sent)
                i += 1
            moved = moved or i > place[rank]
            place[rank], clock[rank] = i, now
    stuck = [rank for rank, lane in enumerate(lanes) if place[rank] < len(lane)]
    if stuck:
        raise InputError(f"{pipeline.name} deadlocks on rank {stuck[0]}", fix="prove_pipeline shows where")
    return max(clock)


def _each(word: str, given: Durations, count: int, of: str) -> tuple[float, ...]:
    times = (float(given),) * count if isinstance(given, int | float) else tuple(map(float, given))
    if len(times) != count:
        plural = "boundaries" if of == "boundary" else f"{of}s"
        raise InputError(f"{len(times)} {word} times for {count} {plural}", rule=f"one number, or one per {of}")
    if any(not t >= 0 for t in times):
        raise InputError(f"{word} times {', '.join(map(str, times))}", rule="times are not negative")
    return times


def idle_seconds(order: str, p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    """Seconds of a step in which a rank does not compute: p ranks, m micro-batches, v stages a rank.

    f, b, w are the seconds of one micro-batch in all stages of a rank: forward, backward for the input, and backward
    for the weights; b + w where the schedule does not split the backward. Stages are equal and messages free; then it
    is exact for every schedule and all m. Schedules that do not drain are full, and their updates free.
    """
    check_order(order, p, m, v)
    both = f + b + w
    if order in ASYNCHRONOUS:
        return 0.0
    if order == "naive":
        # While another rank works, this one waits.
        return (p - 1) * m * both
    if order in ("gpipe", "1f1b"):
        # Filling the pipeline, and draining it.
        return (p - 1) * both
    if order == "interleaved":
        # As many stages to fill, but each is 1/v as long. A group of fewer than p micro-batches leaves a gap, v - 1
        # times.
        return ((p - 1) + (v - 1) * max(0, p - m)) * both / v
    if order == "zero-bubble" and v == 1:
        # As 1F1B, but weight gradients are deferred, and fill a part of the drain.
        return (p - 1) * (f + b) - (min(m, p) - 1) * min(f, b, w)
    # The V schedule comes from a simulation, so it is counted by one: (p - 1) (f + b + w) / 6 for m > p and f = b = w.
    times = time_pipeline(pipeline_order(order, p, m, v), forward=f / v, backward=b / v, weight=w / v)
    return times.seconds - m * both


def pipeline_seconds(order: str, p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    """Seconds of all forwards and backwards of a step: the work of a rank and its bubble."""
    return m * (f + b + w) + idle_seconds(order, p, m, v, f, b, w)


def bubble(order: str, p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    """The share of the time in which a rank does not compute."""
    whole = pipeline_seconds(order, p, m, v, f, b, w)
    return 1 - m * (f + b + w) / whole if whole else 0.0
