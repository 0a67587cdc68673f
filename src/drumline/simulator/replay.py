"""Replays schedules: a collective event by event on a topology of links, a pipeline action by action."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..core.timeline import Span, Timeline
from ..costs.pipeline_clock import Durations, time_pipeline
from ..schedules import Pipeline, Schedule, Send, messages
from ..theory.alpha_beta import Links, Port, as_topology
from .edge_coloring import turns
from .event_loop import EventLoop


def replay(schedule: Schedule, message_bytes: int, links: Links, *, itemsize: int = 1) -> Timeline:
    """Replay a collective on a topology: one span per message, on lane `link` of its sender.

    A rank enters a round when it has sent and received all of its own messages of earlier rounds; a message starts
    when both of its ends are in the round and neither sends, or receives, another. Several messages of a rank in a
    round follow each other by `turns`. Ranks do not wait for each other otherwise, so with equal messages in each round
    the end is never later than the price by rounds.
    """
    return _Replay(schedule, schedule.sizes(message_bytes, itemsize=itemsize), links).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    """One message of a schedule. Compared by identity."""

    number: int
    """Its index among all: of two that could start at once, the lower one starts first."""
    round: int
    src: int
    dst: int
    bytes: int

    @property
    def ports(self) -> tuple[Port, ...]:
        return (("out", self.src), ("in", self.dst))


@dataclass(slots=True)
class _OpenRound:
    """A round of one rank, and the number of its messages that have not arrived."""

    round: int
    messages: int


class _Replay:
    """The state of one replay of a collective."""

    def __init__(self, schedule: Schedule, sizes: Sequence[int], links: Links) -> None:
        self.schedule, self.topology, self.loop = schedule, as_topology(links), EventLoop()
        self.open_rounds: list[deque[_OpenRound]] = [deque() for _ in range(schedule.p)]
        """By rank: its unfinished rounds."""
        self.queues: dict[Port, deque[_Message]] = {
            (direction, rank): deque() for direction in ("out", "in") for rank in range(schedule.p)
        }
        """By port: the messages that have not started, in order."""
        self.busy: set[Port] = set()
        self.waiting_for_wire: deque[tuple[_Message, float]] = deque()
        """Messages past their start-up that wait for a shared port, with their start time."""
        self.spans: list[Span] = []
        self.count = 0
        for k, sends in enumerate(schedule.rounds):
            self._add(k, messages(sends), sizes)

    def _add(self, k: int, sends: dict[tuple[int, int], list[Send]], sizes: Sequence[int]) -> None:
        """Queue the messages of a round behind those of earlier rounds."""
        turn = turns(sends)
        for src, dst in sorted(sends, key=turn.__getitem__):
            self.count += 1
            message = _Message(self.count, k, src, dst, sum(sizes[s.chunk] for s in sends[src, dst]))
            for port in message.ports:
                self.queues[port].append(message)
        for rank, count in Counter(rank for pair in sends for rank in pair).items():
            self.open_rounds[rank].append(_OpenRound(k, count))

    def run(self) -> Timeline:
        """Run to the end."""
        for rank in range(self.schedule.p):
            self._start(rank)
        self.loop.run()
        stuck = [rank for rank, rounds in enumerate(self.open_rounds) if rounds]
        assert not stuck, f"ranks {stuck} never finished"
        return Timeline("predicted", tuple(self.spans))

    def _start(self, rank: int) -> None:
        """Start the next message from this rank and the next one to it, if both of their ends are ready."""
        heads = [self.queues[side, rank][0] for side in ("out", "in") if self.queues[side, rank]]
        for message in sorted(heads, key=lambda message: message.number):
            if self._ready(message):
                for port in message.ports:
                    self.queues[port].popleft()
                self.busy.update(message.ports)
                alpha = self.topology.link(message.src, message.dst).alpha
                self.loop.after(alpha, partial(self._wire, message, self.loop.now))

    def _ready(self, message: _Message) -> bool:
        """Whether both ends are in the message's round, and it is next at both."""
        return (
            self.busy.isdisjoint(message.ports)
            and all(self.queues[port][0] is message for port in message.ports)
            and all(self.open_rounds[rank][0].round == message.round for rank in (message.src, message.dst))
        )

    def _wire(self, message: _Message, since: float) -> None:
        """The start-up is over: queue for shared ports."""
        self.waiting_for_wire.append((message, since))
        self._carry()

    def _carry(self) -> None:
        """Put every message on the wire whose shared ports are free, first come first served."""
        queue = self.waiting_for_wire
        self.waiting_for_wire = deque()
        for message, since in queue:
            shared = self.topology.shared(message.src, message.dst)
            if self.busy.isdisjoint(shared):
                self.busy.update(shared)
                beta = self.topology.link(message.src, message.dst).beta
                self.loop.after(message.bytes * beta, partial(self._finish, message, since))
            else:
                self.waiting_for_wire.append((message, since))

    def _finish(self, message: _Message, since: float) -> None:
        """The message has arrived: free its ports and resume both ends, and messages that waited for the ports."""
        name = f"round {message.round}: {message.src}->{message.dst}"
        self.spans.append(Span(message.src, "link", name, since, self.loop.now, float(message.bytes)))
        self.busy.difference_update(message.ports, self.topology.shared(message.src, message.dst))
        for rank in (message.src, message.dst):
            now = self.open_rounds[rank][0]
            now.messages -= 1
            if not now.messages:
                self.open_rounds[rank].popleft()
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
    """A pipeline schedule as `costs.pipeline_clock` times it, in spans on the lanes `compute` and `link` of the ranks.

    Messages that take no time have no span.
    """
    times = time_pipeline(pipeline, forward=forward, backward=backward, weight=weight, transfer=transfer, skips=skips)
    spans = [Span(t.rank, "compute", pipeline.label(t.action), t.start, t.end) for t in times.actions]
    for sent in times.transfers:
        if sent.end > sent.start:
            name = f"{pipeline.label(sent.action)} {sent.src}->{sent.dst}"
            spans.append(Span(sent.src, "link", name, sent.start, sent.end))
    return Timeline("predicted", tuple(spans))


def replay_in_thirds(pipeline: Pipeline) -> Timeline:
    """A schedule with the durations by which schedules are compared: forward 1, backward 2 for a rank and micro-batch.

    Half of the backward is for the weights; a rank's stages share its work equally.
    """
    share = len(pipeline.lanes) / pipeline.stages
    return replay_pipeline(
        pipeline, forward=share, backward=share if pipeline.splits_backward else 2 * share, weight=share
    )


def bubble(timeline: Timeline) -> float:
    """The share of the time in which ranks do not compute, from the first start to the last end."""
    ranks = timeline.ranks
    whole = len(ranks) * timeline.seconds
    return 1 - sum(timeline.busy_seconds(rank, "compute") for rank in ranks) / whole if whole else 0.0
