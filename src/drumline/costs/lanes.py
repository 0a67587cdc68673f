"""When each action of a pipeline order starts and ends: every rank runs its lane in order, as soon as it can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.errors import InputError
from ..schedules import Action, Pipeline, check_skips

Durations = float | Sequence[float]
"""Seconds: the same for all stages (or boundaries), or one number for each."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An action and when a rank runs it."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Hop:
    """What an action made, on its way to a stage of another rank."""

    src: int
    dst: int
    action: Action
    stage: int
    """The stage that wants it."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Played:
    """A pipeline order with its times."""

    ranks: int
    actions: tuple[Timed, ...]
    """By start."""
    hops: tuple[Hop, ...]
    """By start."""

    @property
    def seconds(self) -> float:
        """Until the last action ends."""
        return max((timed.end for timed in self.actions), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(timed.end - timed.start for timed in self.actions if timed.rank == rank)

    @property
    def bubble(self) -> float:
        """The share of the time in which ranks do not compute."""
        whole = self.ranks * self.seconds
        return 1 - sum(timed.end - timed.start for timed in self.actions) / whole if whole else 0.0


def play(
    pipeline: Pipeline,
    *,
    forward: Durations,
    backward: Durations,
    weight: Durations = 0.0,
    transfer: Durations = 0.0,
    skips: Mapping[tuple[int, int], float] | None = None,
) -> Played:
    """The times of an order. Durations are per micro-batch and stage, of the transfer per boundary between stages.

    Where the order has W actions, `backward` is the part for the input and `weight` the part for the weights. What
    goes to a stage on another rank travels behind computation, one after the other on each link in each direction.
    `skips` are values that go from a stage directly to a later one, with their seconds.
    """
    stages = pipeline.stages
    seconds = {
        kind: _each(word, given, stages, "stage")
        for kind, word, given in (("F", "forward", forward), ("B", "backward", backward), ("W", "weight", weight))
    }
    hops = {(s, s + 1): t for s, t in enumerate(_each("transfer", transfer, stages - 1, "boundary"))}
    check_skips(tuple(skips or ()), stages)
    _each("skip", tuple((skips or {}).values()), len(skips or ()), "skip")
    return _Play(pipeline, seconds, hops | dict(skips or {})).run()


@dataclass(slots=True)
class _Play:
    """The state: where each lane is, and what has arrived where."""

    pipeline: Pipeline
    seconds: dict[str, tuple[float, ...]]
    ways: dict[tuple[int, int], float]
    """(stage, later stage) -> seconds of a value on this way, or of its gradient back."""
    homes: dict[int, int] = field(default_factory=dict)
    later: dict[int, list[int]] = field(default_factory=dict)
    earlier: dict[int, list[int]] = field(default_factory=dict)
    """Stage -> the stages that it sends values to, and has them from; the neighbour first."""
    arrived: dict[tuple[Action, int], float] = field(default_factory=dict)
    """(action, stage) -> when the stage's rank has what the action made."""
    link_free: dict[tuple[int, int], float] = field(default_factory=dict)
    actions: list[Timed] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)

    def run(self) -> Played:
        """Let each lane go on as far as what has arrived allows, until all are at their end.

        Times come out the same in whichever order lanes are looked at: a link is fed by one lane alone, in its order.
        """
        self.homes = self.pipeline.homes()
        for start, end in sorted(self.ways):
            self.later.setdefault(start, []).append(end)
        for start, end in sorted(self.ways, reverse=True):
            self.earlier.setdefault(end, []).append(start)
        lanes = self.pipeline.lanes
        place, clock = [0] * len(lanes), [0.0] * len(lanes)
        moved = True
        while moved:
            moved = False
            for rank, lane in enumerate(lanes):
                while place[rank] < len(lane):
                    action = lane[place[rank]]
                    ready = self._ready(action)
                    if ready is None:
                        break
                    clock[rank] = self._do(rank, action, max(ready, clock[rank]))
                    place[rank] += 1
                    moved = True
        stuck = [rank for rank, lane in enumerate(lanes) if place[rank] < len(lane)]
        if stuck:
            raise InputError(f"{self.pipeline.name} deadlocks on rank {stuck[0]}", fix="prove_pipeline says where")
        self.actions.sort(key=lambda timed: (timed.start, timed.end, timed.rank))
        self.hops.sort(key=lambda hop: (hop.start, hop.end, hop.src))
        return Played(len(lanes), tuple(self.actions), tuple(self.hops))

    def _needs(self, action: Action) -> Iterator[Action]:
        """What the action needs by the chain, and by the values that skip stages."""
        if action.kind == "F":
            return (Action("F", s, action.micro) for s in self.earlier.get(action.stage, ()))
        own = Action("B" if action.kind == "W" else "F", action.stage, action.micro)
        after = self.later.get(action.stage, ()) if action.kind == "B" else ()
        return iter((own, *(Action("B", s, action.micro) for s in after)))

    def _ready(self, action: Action) -> float | None:
        """When all that the action needs is there; None where that is not known yet."""
        times = [self.arrived.get((need, action.stage)) for need in self._needs(action)]
        known = [t for t in times if t is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def _do(self, rank: int, action: Action, start: float) -> float:
        """Run the action, keep its result and send it to who wants it; the end."""
        end = start + self.seconds[action.kind][action.stage]
        self.actions.append(Timed(rank, action, start, end))
        self.arrived[action, action.stage] = end
        wants = {"F": self.later, "B": self.earlier}.get(action.kind, {}).get(action.stage, ())
        for stage in wants:
            other = self.homes.get(stage, rank)
            self.arrived[action, stage] = end
            if other != rank:
                seconds = self.ways[min(stage, action.stage), max(stage, action.stage)]
                sent = max(end, self.link_free.get((rank, other), 0.0))
                self.link_free[rank, other] = self.arrived[action, stage] = sent + seconds
                self.hops.append(Hop(rank, other, action, stage, sent, sent + seconds))
        return end


def _each(word: str, given: Durations, count: int, of: str) -> tuple[float, ...]:
    times = (float(given),) * count if isinstance(given, int | float) else tuple(map(float, given))
    if len(times) != count:
        plural = "boundaries" if of == "boundary" else f"{of}s"
        raise InputError(f"{len(times)} {word} times for {count} {plural}", rule=f"one number, or one per {of}")
    if any(not t >= 0 for t in times):
        raise InputError(f"{word} times {', '.join(map(str, times))}", rule="times are not negative")
    return times
