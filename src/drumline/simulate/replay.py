"""Replays schedules event by event: a collective on a topology of links, a pipeline order on its stages."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..cost.links import Links, Port, as_topology
from ..errors import InputError
from ..schedule import Action, Pipeline, Schedule, Send, messages
from ..timeline import Span, Timeline
from .loop import Loop
from .turns import turns

Durations = float | Sequence[float]
"""Seconds: the same for all stages, or one number per stage."""


def replay(schedule: Schedule, message_bytes: int, links: Links, *, itemsize: int = 1) -> Timeline:
    """A collective on a topology: one span per message, on lane `link` of its sender.

    A rank enters a round when it has sent and received all of its own messages of earlier rounds; a message starts
    when both of its ends are in the round and neither sends, or receives, another. Where a rank has several in a round,
    they follow each other by `turns`. Ranks need not wait for each other beyond that, so with equal messages in each
    round the end is never later than the price by rounds.
    """
    return _Replay(schedule, schedule.sizes(message_bytes, itemsize=itemsize), links).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    """One message of a schedule. Compared by identity."""

    number: int
    """Its place among all: of two that could start at once, the lower one does so first."""
    round: int
    src: int
    dst: int
    bytes: int

    @property
    def ports(self) -> tuple[Port, ...]:
        return (("out", self.src), ("in", self.dst))


@dataclass(slots=True)
class _Todo:
    """A round of one rank, and how many of its messages are not through."""

    round: int
    messages: int


class _Replay:
    """The state of one replay of a collective."""

    def __init__(self, schedule: Schedule, sizes: Sequence[int], links: Links) -> None:
        self.schedule, self.topology, self.loop = schedule, as_topology(links), Loop()
        self.todo: list[deque[_Todo]] = [deque() for _ in range(schedule.p)]
        """By rank: its rounds that are not finished."""
        self.queues: dict[Port, deque[_Message]] = {
            (way, rank): deque() for way in ("out", "in") for rank in range(schedule.p)
        }
        """By port: the messages that have not started, in the order in which they will."""
        self.held: set[Port] = set()
        self.wired: deque[tuple[_Message, float]] = deque()
        """Messages past their start-up that wait for a shared port, with the time at which they started."""
        self.spans: list[Span] = []
        self.count = 0
        for k, sends in enumerate(schedule.rounds):
            self._add(k, messages(sends), sizes)

    def _add(self, k: int, found: dict[tuple[int, int], list[Send]], sizes: Sequence[int]) -> None:
        """Put the messages of a round behind those of earlier rounds."""
        turn = turns(found)
        for src, dst in sorted(found, key=turn.__getitem__):
            self.count += 1
            message = _Message(self.count, k, src, dst, sum(sizes[s.chunk] for s in found[src, dst]))
            for port in message.ports:
                self.queues[port].append(message)
        for rank, count in Counter(rank for pair in found for rank in pair).items():
            self.todo[rank].append(_Todo(k, count))

    def run(self) -> Timeline:
        """Play to the end."""
        for rank in range(self.schedule.p):
            self._start(rank)
        self.loop.run()
        stuck = [rank for rank, rounds in enumerate(self.todo) if rounds]
        assert not stuck, f"ranks {stuck} never finished"
        return Timeline("predicted", tuple(self.spans))

    def _start(self, rank: int) -> None:
        """Start the next message out of this rank and the next one into it, if both of their ends are so far."""
        heads = [self.queues[way, rank][0] for way in ("out", "in") if self.queues[way, rank]]
        for message in sorted(heads, key=lambda message: message.number):
            if self._ready(message):
                for port in message.ports:
                    self.queues[port].popleft()
                self.held.update(message.ports)
                alpha = self.topology.link(message.src, message.dst).alpha
                self.loop.after(alpha, partial(self._wire, message, self.loop.now))

    def _ready(self, message: _Message) -> bool:
        """Whether both ends are in the message's round, and it is next at both."""
        return (
            self.held.isdisjoint(message.ports)
            and all(self.queues[port][0] is message for port in message.ports)
            and all(self.todo[rank][0].round == message.round for rank in (message.src, message.dst))
        )

    def _wire(self, message: _Message, since: float) -> None:
        """The start-up is over: queue for what is shared."""
        self.wired.append((message, since))
        self._carry()

    def _carry(self) -> None:
        """Put on the wire whatever finds its shared ports free, first come first served."""
        waiting = self.wired
        self.wired = deque()
        for message, since in waiting:
            shared = self.topology.shared(message.src, message.dst)
            if self.held.isdisjoint(shared):
                self.held.update(shared)
                beta = self.topology.link(message.src, message.dst).beta
                self.loop.after(message.bytes * beta, partial(self._finish, message, since))
            else:
                self.wired.append((message, since))

    def _finish(self, message: _Message, since: float) -> None:
        """The message is there: free its ports and let both ends, and who waited for the ports, go on."""
        name = f"round {message.round}: {message.src}->{message.dst}"
        self.spans.append(Span(message.src, "link", name, since, self.loop.now, float(message.bytes)))
        self.held.difference_update(message.ports, self.topology.shared(message.src, message.dst))
        for rank in (message.src, message.dst):
            now = self.todo[rank][0]
            now.messages -= 1
            if not now.messages:
                self.todo[rank].popleft()
        for rank in (message.src, message.dst):
            self._start(rank)
        self._carry()


def replay_pipeline(
    pipeline: Pipeline,
    *,
    forward: Durations,
    backward: Durations,
    weight: Durations = 0.0,
    transfer: float = 0.0,
) -> Timeline:
    """A pipeline order: every rank runs its lane in order, each action as soon as what it needs has arrived.

    Durations are per micro-batch. Where the order has W actions, `backward` is the part for the input and `weight` the
    part for the weights. What goes to a stage on another rank takes `transfer` seconds, one after the other on each
    link in each direction, behind computation. Spans lie on the lanes `compute` and `link` of the ranks.
    """
    seconds = {
        kind: _per_stage(word, given, pipeline.stages)
        for kind, word, given in (("F", "forward", forward), ("B", "backward", backward), ("W", "weight", weight))
    }
    return _PipelineReplay(pipeline, seconds, transfer).run()


def bubble(timeline: Timeline) -> float:
    """The share of the time in which ranks do not compute, from the first start to the last end."""
    ranks = timeline.ranks
    whole = len(ranks) * timeline.seconds
    return 1 - sum(timeline.busy(rank, "compute") for rank in ranks) / whole if whole else 0.0


class _PipelineReplay:
    """The state of one replay of a pipeline order."""

    def __init__(self, pipeline: Pipeline, seconds: dict[str, tuple[float, ...]], transfer: float) -> None:
        self.pipeline, self.seconds, self.transfer, self.loop = pipeline, seconds, transfer, Loop()
        self.homes = pipeline.homes()
        self.place = [0] * len(pipeline.lanes)
        self.busy = [False] * len(pipeline.lanes)
        self.arrived: set[tuple[int, Action]] = set()
        """(rank, action): the rank has what the action made."""
        self.link_free: dict[tuple[int, int], float] = {}
        self.spans: list[Span] = []

    def run(self) -> Timeline:
        """Play to the end."""
        for rank in range(len(self.pipeline.lanes)):
            self._start(rank)
        self.loop.run()
        stuck = [r for r, lane in enumerate(self.pipeline.lanes) if self.place[r] < len(lane)]
        if stuck:
            raise InputError(f"{self.pipeline.name} deadlocks on rank {stuck[0]}", fix="prove_pipeline says where")
        return Timeline("predicted", tuple(self.spans))

    def _start(self, rank: int) -> None:
        """Begin the next action of the lane, if the rank is free and has what it needs."""
        lane = self.pipeline.lanes[rank]
        if self.busy[rank] or self.place[rank] == len(lane):
            return
        action = lane[self.place[rank]]
        if all((rank, need) in self.arrived for need in action.needs(self.pipeline.stages)):
            self.busy[rank] = True
            duration = self.seconds[action.kind][action.stage]
            self.loop.after(duration, partial(self._finish, rank, action, self.loop.now))

    def _finish(self, rank: int, action: Action, since: float) -> None:
        """The action is done: keep its result, send it on, take the next."""
        label = self.pipeline.label(action)
        self.spans.append(Span(rank, "compute", label, since, self.loop.now))
        self.busy[rank] = False
        self.place[rank] += 1
        self._arrive(rank, action)
        next_stage = action.stage + {"F": 1, "B": -1, "W": 0}[action.kind]
        other = self.homes.get(next_stage, rank)
        if other != rank:
            start = max(self.loop.now, self.link_free.get((rank, other), 0.0))
            end = self.link_free[rank, other] = start + self.transfer
            if self.transfer:
                self.spans.append(Span(rank, "link", f"{label} {rank}->{other}", start, end))
            self.loop.at(end, partial(self._arrive, other, action))

    def _arrive(self, rank: int, action: Action) -> None:
        self.arrived.add((rank, action))
        self._start(rank)


def _per_stage(word: str, given: Durations, stages: int) -> tuple[float, ...]:
    times = (float(given),) * stages if isinstance(given, int | float) else tuple(map(float, given))
    if len(times) != stages:
        raise InputError(f"{len(times)} {word} times for {stages} stages", rule="one number, or one per stage")
    if any(not t >= 0 for t in times):
        raise InputError(f"{word} times {', '.join(map(str, times))}", rule="times are not negative")
    return times
