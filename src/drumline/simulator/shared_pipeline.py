"""Replays the passes of a pipeline on links that its messages share with each other and with sums of gradients.

Actions, messages of their layers, messages between stages and what follows a stage's last backward are events of one
loop; all messages are flows of one network with fair rates. Where nothing meets on a link, the times are those of
`costs.pipeline_clock`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..costs.pipeline_clock import PipelineTimes, StageTransfer, TimedAction
from ..schedules import Action, Pipeline
from .event_loop import EventLoop
from .message_flows import WHOLE_LINKS, Flow
from .network import Done, FairNetwork

Part = float | Flow
"""Of an action, in order: seconds of compute, or a message that it waits for."""
Named = tuple[str, Part, float]
"""After the last backward: its name on the timeline, what it is, the bytes of a message."""
TimedPart = tuple[str, float, float, float]
"""Name, start, end, bytes."""


@dataclass(frozen=True, slots=True)
class SharedPasses:
    """When everything happens until ranks meet."""

    times: PipelineTimes
    reductions: tuple[tuple[TimedPart, ...], ...]
    """By rank: what follows its last backward."""


@dataclass(slots=True)
class PipelineFlows:
    """The compute and the messages of a step of a pipeline."""

    order: Pipeline
    """Of one step, with a drain."""
    parts: Mapping[str, Sequence[Sequence[Part]]]
    """By kind of action (F, B, W) and stage."""
    sends: Mapping[tuple[int, int], Flow]
    """By the stages that a message leaves and reaches, where these are on different ranks."""
    after: Sequence[Sequence[Named]]
    """By rank: what follows its last backward."""
    last: int
    """The rank whose part begins when the whole pipeline has ended, as the estimate counts it."""


def replay_shared(step: PipelineFlows) -> SharedPasses:
    """Replay a step whose messages share links."""
    replay = _Replay(step)
    replay.run()
    actions = tuple(sorted(replay.actions, key=lambda t: (t.start, t.end, t.rank)))
    transfers = tuple(sorted(replay.transfers, key=lambda t: (t.start, t.end, t.src)))
    return SharedPasses(PipelineTimes(len(step.order.lanes), actions, transfers), tuple(map(tuple, replay.reductions)))


@dataclass(slots=True, eq=False)
class _Replay:
    """The state of one replay."""

    step: PipelineFlows
    loop: EventLoop = field(default_factory=EventLoop)
    actions: list[TimedAction] = field(default_factory=list)
    transfers: list[StageTransfer] = field(default_factory=list)
    reductions: list[list[TimedPart]] = field(default_factory=list)
    network: FairNetwork = field(init=False)
    homes: dict[int, int] = field(init=False)
    place: list[int] = field(init=False)
    """By rank: its next action."""
    busy: list[bool] = field(init=False)
    ended: set[tuple[str, int, int]] = field(default_factory=set)
    arrived: set[tuple[str, int, int]] = field(default_factory=set)
    queues: defaultdict[tuple[int, int], deque[tuple[Action, int]]] = field(default_factory=lambda: defaultdict(deque))
    """By sender and receiver: what waits for the connection between them, the first of which is under way."""

    def __post_init__(self) -> None:
        ranks = len(self.step.order.lanes)
        self.network, self.homes = FairNetwork(WHOLE_LINKS, self.loop), self.step.order.homes()
        self.place, self.busy = [0] * ranks, [False] * ranks
        self.reductions = [[] for _ in range(ranks)]

    def run(self) -> None:
        """Let everything happen."""
        for rank in range(len(self.place)):
            self.loop.at(0.0, partial(self._next, rank))
        self.loop.run()
        lanes = self.step.order.lanes
        stuck = [rank for rank, lane in enumerate(lanes) if self.place[rank] < len(lane)]
        assert not stuck, f"ranks {stuck} never finished"

    def _next(self, rank: int) -> None:
        """Start the next action of a rank, if it is idle and the inputs are there."""
        lane, i = self.step.order.lanes[rank], self.place[rank]
        if self.busy[rank] or i == len(lane) or not self._ready(lane[i]):
            return
        self.busy[rank] = True
        action = lane[i]
        parts = self.step.parts[action.kind][action.stage]
        self._run(deque(parts), partial(self._finish, rank, action, self.loop.now))

    def _ready(self, action: Action) -> bool:
        kind, stage, micro = action.kind, action.stage, action.micro
        last = self.step.order.stages - 1
        if kind == "F":
            return stage == 0 or ("F", stage, micro) in self.arrived
        if kind == "W":
            return ("B", stage, micro) in self.ended
        return ("F", stage, micro) in self.ended and (stage == last or ("B", stage, micro) in self.arrived)

    def _run(self, parts: deque[Part], done: Done) -> None:
        """One part after the other."""
        if not parts:
            done()
            return
        part = parts.popleft()
        after = partial(self._run, parts, done)
        if isinstance(part, Flow):
            self._flow(part, after)
        else:
            self.loop.after(part, after)

    def _flow(self, flow: Flow, done: Done) -> None:
        """A message: its start-up, then its legs."""

        def leg(i: int) -> None:
            if i == len(flow.legs):
                done()
            else:
                self.network.send(flow.legs[i].ports, flow.legs[i].seconds, partial(leg, i + 1))

        self.loop.after(flow.startup, partial(leg, 0))

    def _finish(self, rank: int, action: Action, start: float) -> None:
        """Record an action, send its result, and go on."""
        self.actions.append(TimedAction(rank, action, start, self.loop.now))
        self.ended.add((action.kind, action.stage, action.micro))
        self.busy[rank] = False
        self.place[rank] += 1
        to = action.stage + {"F": 1, "B": -1, "W": 0}[action.kind]
        if action.kind != "W" and 0 <= to < self.step.order.stages:
            home = self.homes[to]
            if home == rank:
                self.arrived.add((action.kind, to, action.micro))
            else:
                queue = self.queues[rank, home]
                queue.append((action, to))
                if len(queue) == 1:
                    self._send(rank, home)
        if self.place[rank] == len(self.step.order.lanes[rank]):
            self._end_passes(rank)
        self._next(rank)

    def _send(self, rank: int, home: int) -> None:
        """Send the first in the queue of a connection."""
        action, to = self.queues[rank, home][0]
        self._flow(self.step.sends[action.stage, to], partial(self._arrive, rank, home, self.loop.now))

    def _arrive(self, rank: int, home: int, start: float) -> None:
        queue = self.queues[rank, home]
        action, to = queue.popleft()
        self.transfers.append(StageTransfer(rank, home, action, to, start, self.loop.now))
        self.arrived.add((action.kind, to, action.micro))
        if queue:
            self._send(rank, home)
        self._next(home)

    def _end_passes(self, rank: int) -> None:
        """A rank has done its passes: it sums its gradients, but the last one when all ranks have done theirs."""
        if rank != self.step.last:
            self._reduce(rank, 0)
        if all(i == len(lane) for i, lane in zip(self.place, self.step.order.lanes, strict=True)):
            self._reduce(self.step.last, 0)

    def _reduce(self, rank: int, i: int) -> None:
        """The parts that follow the last backward, one part after the other."""
        if i == len(self.step.after[rank]):
            return
        name, part, size = self.step.after[rank][i]
        start = self.loop.now

        def end() -> None:
            self.reductions[rank].append((name, start, self.loop.now, size))
            self._reduce(rank, i + 1)

        self._run(deque([part]), end)
