"""Replays collectives message by message on a topology whose links are shared fairly; several at once if asked."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ..core.errors import InputError
from ..core.timeline import Span, Timeline
from ..schedules import Schedule, messages
from ..theory.alpha_beta import Links, Topology, as_topology
from .edge_coloring import turns
from .event_loop import EventLoop
from .network import FairNetwork, LinkUse, ReplayTooLarge

MOST_MESSAGES = 500_000
"""Messages of a collective that is replayed one by one: about 20 s and 300 MB."""

MOST_TURNS = 10_000_000
"""Messages of a round times those of its busiest rank: the work of finding their turns, a few seconds."""

_Side = tuple[str, int]
"""A rank as a sender or as a receiver: it sends one message and receives one at a time."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective that some ranks begin at some time."""

    schedule: Schedule
    bytes: int
    """Of the whole buffer."""
    start: float = 0.0
    """Seconds."""
    ranks: Sequence[int] | None = None
    """Ranks of the topology that take part, in the order of the schedule's ranks (default: the first ones)."""
    itemsize: int = 1
    """Bytes of an element, which is not split."""


@dataclass(frozen=True, slots=True)
class NetworkReplay:
    """Collectives as they were replayed: when they end, and what they did to the links."""

    timeline: Timeline
    seconds: float
    """When the last of them ends."""
    ends: tuple[float, ...]
    """When each of them ends."""
    link_use: tuple[LinkUse, ...]
    """By level of links, the busiest first."""
    kinds: int | None = None
    """Kinds of ranks, if one rank of each kind was replayed for all; None if every rank was."""
    priced_as_one: bool = False
    """Whether it is the closed form of a collective that shares no link, drawn as one span."""


def replay(schedule: Schedule, message_bytes: int, links: Links, *, itemsize: int = 1) -> Timeline:
    """Replay a collective on a topology: one span per message, on lane `link` of its sender.

    A rank enters a round when it has sent and received all of its own messages of earlier rounds; a message starts
    when both of its ends are in the round and neither sends, or receives, another. Several messages of a rank in a
    round follow each other by `turns`. Ranks do not wait for each other otherwise, so on one link, with equal messages
    in each round, the end is never later than the price by rounds. After its start-up, a message shares the links on
    its way with others, fairly.
    """
    return replay_together([CollectiveCall(schedule, message_bytes, itemsize=itemsize)], links).timeline


def replay_together(calls: Sequence[CollectiveCall], links: Links) -> NetworkReplay:
    """Replay collectives that run at the same time on one network. Spans of several begin with `#` and a number.

    Ranks that take part in several send for each of them at the same time, as over separate connections.
    """
    topology, loop = as_topology(links), EventLoop()
    network = FairNetwork(topology, loop)
    replays = [
        _Replay(call, topology, loop, network, f"#{i} " if len(calls) > 1 else "") for i, call in enumerate(calls)
    ]
    for one in replays:
        loop.at(one.call.start, one.begin)
    end = loop.run()
    for one in replays:
        one.check_finished()
    timeline = Timeline("predicted", tuple(span for one in replays for span in one.spans))
    ends = tuple(max((span.end for span in one.spans), default=one.call.start) for one in replays)
    return NetworkReplay(timeline, max(ends, default=0.0), ends, network.use(end))


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
    def sides(self) -> tuple[_Side, _Side]:
        return ("out", self.src), ("in", self.dst)


@dataclass(slots=True)
class _OpenRound:
    """A round of one rank, and the number of its messages that have not arrived."""

    round: int
    messages: int


@dataclass(slots=True, eq=False)
class _Replay:
    """The state of one replay of a collective."""

    call: CollectiveCall
    topology: Topology
    loop: EventLoop
    network: FairNetwork
    label: str
    ranks: Sequence[int] = ()
    """Rank of the schedule -> rank of the topology."""
    open_rounds: list[deque[_OpenRound]] = field(default_factory=list)
    """By rank: its unfinished rounds."""
    queues: dict[_Side, deque[_Message]] = field(default_factory=dict)
    """By sender and by receiver: the messages that have not started, in order."""
    busy: set[_Side] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        schedule, p = self.call.schedule, self.call.schedule.p
        self.ranks = range(p) if self.call.ranks is None else tuple(self.call.ranks)
        if len(set(self.ranks)) != p:
            raise InputError(f"{schedule.name} on ranks {list(self.ranks)}", rule=f"{p} different ranks")
        self.open_rounds = [deque() for _ in range(p)]
        self.queues = {(side, rank): deque() for side in ("out", "in") for rank in range(p)}
        sizes = schedule.sizes(self.call.bytes, itemsize=self.call.itemsize)
        for k, sends in enumerate(schedule.rounds):
            self._add(k, {pair: sum(sizes[s.chunk] for s in parts) for pair, parts in messages(sends).items()})

    def _add(self, k: int, sizes: dict[tuple[int, int], int]) -> None:
        """Queue the messages of a round, with their bytes, behind those of earlier rounds."""
        fan = max((n for end in (0, 1) for n in Counter(pair[end] for pair in sizes).values()), default=0)
        if self.count + len(sizes) > MOST_MESSAGES or fan * len(sizes) > MOST_TURNS:
            raise too_many_messages(self.call.schedule.name, self.call.schedule.p)
        turn = turns(sizes)
        for src, dst in sorted(sizes, key=turn.__getitem__):
            self.count += 1
            message = _Message(self.count, k, src, dst, sizes[src, dst])
            for side in message.sides:
                self.queues[side].append(message)
        for rank, count in Counter(rank for pair in sizes for rank in pair).items():
            self.open_rounds[rank].append(_OpenRound(k, count))

    def begin(self) -> None:
        """Start what can start."""
        for rank in range(self.call.schedule.p):
            self._start(rank)

    def check_finished(self) -> None:
        """Every rank must have finished."""
        stuck = [rank for rank, rounds in enumerate(self.open_rounds) if rounds]
        assert not stuck, f"ranks {stuck} never finished"

    def _start(self, rank: int) -> None:
        """Start the next message from this rank and the next one to it, if both of their ends are ready."""
        heads = [self.queues[side, rank][0] for side in ("out", "in") if self.queues[side, rank]]
        for message in sorted(heads, key=lambda message: message.number):
            if self._ready(message):
                for side in message.sides:
                    self.queues[side].popleft()
                self.busy.update(message.sides)
                alpha = self.topology.link(self.ranks[message.src], self.ranks[message.dst]).alpha
                self.loop.after(alpha, partial(self._transfer, message, self.loop.now))

    def _ready(self, message: _Message) -> bool:
        """Whether both ends are in the message's round, and it is next at both."""
        return (
            self.busy.isdisjoint(message.sides)
            and all(self.queues[side][0] is message for side in message.sides)
            and all(self.open_rounds[rank][0].round == message.round for rank in (message.src, message.dst))
        )

    def _transfer(self, message: _Message, since: float) -> None:
        """The start-up is over: the bytes follow."""
        path = self.topology.path(self.ranks[message.src], self.ranks[message.dst])
        self.network.send(path, message.bytes, partial(self._finish, message, since))

    def _finish(self, message: _Message, since: float) -> None:
        """The message has arrived: resume both ends."""
        src, dst = self.ranks[message.src], self.ranks[message.dst]
        name = f"{self.label}round {message.round}: {src}->{dst}"
        self.spans.append(Span(src, "link", name, since, self.loop.now, float(message.bytes)))
        self.busy.difference_update(message.sides)
        for rank in (message.src, message.dst):
            now = self.open_rounds[rank][0]
            now.messages -= 1
            if not now.messages:
                self.open_rounds[rank].popleft()
        for rank in (message.src, message.dst):
            self._start(rank)


def too_many_messages(name: str, p: int, fix: str = "fewer ranks") -> ReplayTooLarge:
    """The error of a collective that is too large to be replayed one message at a time."""
    return ReplayTooLarge(
        f"{name} over {p} ranks, one message at a time",
        rule=f"at most {MOST_MESSAGES:,} messages, fewer if many share links; ranks that are alike count once",
        fix=fix,
    )
