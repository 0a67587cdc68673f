"""Replays schedules: a collective event by event on a topology of links, a pipeline order action by action."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..core.timeline import Span, Timeline
from ..costs.lanes import Durations, play
from ..schedules import Pipeline, Schedule, Send, messages
from ..theory.alpha_beta import Links, Port, as_topology
from .loop import Loop
from .turns import turns


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
    transfer: Durations = 0.0,
    skips: Mapping[tuple[int, int], float] | None = None,
) -> Timeline:
    """A pipeline order as `cost.lanes.play` counts it, in spans on the lanes `compute` and `link` of the ranks.

    Every rank runs its lane in order, each action as soon as what it needs has arrived. Messages of no length have no
    span.
    """
    played = play(pipeline, forward=forward, backward=backward, weight=weight, transfer=transfer, skips=skips)
    spans = [Span(t.rank, "compute", pipeline.label(t.action), t.start, t.end) for t in played.actions]
    for hop in played.hops:
        if hop.end > hop.start:
            name = f"{pipeline.label(hop.action)} {hop.src}->{hop.dst}"
            spans.append(Span(hop.src, "link", name, hop.start, hop.end))
    return Timeline("predicted", tuple(spans))


def replay_in_thirds(pipeline: Pipeline) -> Timeline:
    """An order on the work by which orders are compared: a rank's forward takes 1, its backward 2 a micro-batch.

    Of the backward, half is for the weights; a rank's stages share its work equally.
    """
    share = len(pipeline.lanes) / pipeline.stages
    return replay_pipeline(
        pipeline, forward=share, backward=share if pipeline.splits_backward else 2 * share, weight=share
    )


def bubble(timeline: Timeline) -> float:
    """The share of the time in which ranks do not compute, from the first start to the last end."""
    ranks = timeline.ranks
    whole = len(ranks) * timeline.seconds
    return 1 - sum(timeline.busy(rank, "compute") for rank in ranks) / whole if whole else 0.0
