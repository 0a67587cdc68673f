"""Draws one predicted step as a timeline: the parts of `costs.step.Step`, laid out on the lanes of each rank.

A rank has two lanes. The compute lane runs layers in order; the communication lane runs messages in the order in which
they become ready. While both are busy, messages proceed at the share `overlap` of their speed.
"""

from __future__ import annotations

from ..clusters import Cluster
from ..core.timeline import Span, Timeline
from ..costs.data_parallel_comm import CollectiveMessage
from ..costs.operator_model import OperatorCostModel
from ..costs.pipeline_cost import PipelineCost
from ..costs.step import Step, Tail
from ..models.profile import Profile
from ..plans import Plan

Row = tuple[str, str, float, float, float]
"""Lane, name, start, end, bytes."""


def simulate_step(profile: Profile, plan: Plan, cluster: Cluster, *, speed: float = 1.0) -> Timeline:
    """The predicted timeline of one step.

    `speed` is that of a machine which runs at a share of its measured speed: all spans are stretched by it.
    """
    step = OperatorCostModel(profile, cluster, plan.precision).step(plan)
    ranks = step.plan.ranks // step.plan.pp
    spans = tuple(
        Span(stage * ranks + i, lane, name, start / speed, end / speed, size)
        for stage, rows in enumerate(_rows(step))
        for i in range(ranks)
        for lane, name, start, end, size in rows
    )
    return Timeline("predicted", spans)


def _rows(step: Step) -> list[list[Row]]:
    """The spans of a rank of each pipeline stage."""
    if step.pipeline is not None:
        passes = _pipeline_rows(step.pipeline)
        start = step.pipeline.seconds
        return [rows + _tail(Lanes(1.0, start), tail) for rows, tail in zip(passes, step.tails, strict=True)]
    lanes, m = Lanes(step.cluster.overlap), step.plan.micro
    for micro in range(m):
        _micro_batch(
            lanes, step, reduces=step.reduces_every_micro_batch or micro == m - 1, label=f" m{micro}" * (m > 1)
        )
        if step.reduces_every_micro_batch:
            lanes.join()
        lanes.compute("communication units", step.sharded_units)
    return [_tail(lanes, step.tails[0])]


def _micro_batch(lanes: Lanes, step: Step, *, reduces: bool, label: str) -> None:
    """Forward through the layers, then backward from the last to the first, each with its messages."""
    forward_ahead, backward_ahead = step.prefetches
    layers = list(zip(step.layers, step.layer_comm, step.collectives.messages, strict=True))
    for i, (time, comm, (gather, _)) in enumerate(layers):
        name = f"{time.layer.name or '(model)'}{label}"
        if not backward_ahead:
            lanes.copy(gather)
        elif i == 0 or not forward_ahead:
            lanes.send(gather)
        lanes.wait(gather)
        if forward_ahead and i + 1 < len(layers):
            lanes.send(layers[i + 1][2][0])
        lanes.compute(f"forward {name}", time.forward)
        lanes.block(f"communication {name}", comm.forward)
    for i, (time, comm, (gather, reduce)) in reversed(list(enumerate(layers))):
        name = f"{time.layer.name or '(model)'}{label}"
        # the group of the whole model, which comes with the first layer, is still gathered
        if i > 0 and not backward_ahead:
            lanes.copy(gather)
        elif i > 0 and i == len(layers) - 1:
            lanes.send(gather)
        if i > 0:
            lanes.wait(gather)
        if i > 1 and backward_ahead:
            lanes.send(layers[i - 1][2][0])
        lanes.compute(f"backward {name}", time.backward)
        lanes.block(f"communication {name}", comm.backward)
        if reduces:
            lanes.send(reduce)


def _pipeline_rows(pipeline: PipelineCost) -> list[list[Row]]:
    """The actions of every rank, and what it sends to other ranks' stages."""
    rows: list[list[Row]] = [[] for _ in range(pipeline.ranks)]
    times = pipeline.times()
    for timed in times.actions:
        word = {"F": "forward", "B": "backward", "W": "weights"}[timed.action.kind]
        name = f"{word} stage {timed.action.stage} m{timed.action.micro}"
        rows[timed.rank].append(("compute", name, timed.start, timed.end, 0.0))
    for sent in times.transfers:
        size = pipeline.stages[min(sent.stage, sent.action.stage)][-1].output
        name = f"{sent.action.kind} to stage {sent.stage}"
        rows[sent.src].append(("communication", name, sent.start, sent.end, size))
    return rows


def _tail(lanes: Lanes, tail: Tail) -> list[Row]:
    """After the last backward: one part after the other."""
    lanes.join()
    for part in tail:
        if part.messages:
            for message in part.messages:
                lanes.send(message)
            lanes.join()
        else:
            lanes.compute(part.name, part.seconds)
    return lanes.rows


class Lanes:
    """The two lanes of a rank: a clock, and the messages in flight."""

    def __init__(self, overlap: float, start: float = 0.0) -> None:
        self.rows: list[Row] = []
        self._overlap = overlap
        self._now = start
        self._queue: list[tuple[CollectiveMessage, float, float]] = []
        """Message, when it started (or -1), its remaining seconds at full speed."""

    def compute(self, name: str, seconds: float) -> None:
        """Run something on the compute lane; messages proceed meanwhile."""
        if seconds <= 0:
            return
        start, self._now = self._now, self._now + seconds
        self.rows.append(("compute", name, start, self._now, 0.0))
        self._advance(start, seconds, self._overlap)

    def block(self, name: str, seconds: float) -> None:
        """Wait for a message of the layer itself, which those in flight do not overtake."""
        if seconds > 0:
            start, self._now = self._now, self._now + seconds
            self.rows.append(("communication", name, start, self._now, 0.0))

    def send(self, message: CollectiveMessage | None) -> None:
        """Put a message, if there is one, on the communication lane."""
        if message is not None:
            self._queue.append((message, -1.0, message.seconds))

    def copy(self, message: CollectiveMessage | None) -> None:
        """Do the work of a message on the compute lane: a copy on demand."""
        if message is not None:
            self.compute(f"communication {message.name}", message.seconds)

    def wait(self, message: CollectiveMessage | None) -> None:
        """Wait until a message has arrived, and so all before it; the compute lane is idle meanwhile."""
        places = [i for i, (queued, _, _) in enumerate(self._queue) if queued is message]
        if message is not None and places:
            self._drain(places[-1] + 1)

    def join(self) -> None:
        """Wait until all messages have arrived."""
        self._drain(len(self._queue))

    def _drain(self, count: int) -> None:
        """Messages run at full speed while the compute lane waits for the first `count` of them."""
        for message, begun, left in self._queue[:count]:
            start, self._now = self._now, self._now + left
            since = start if begun < 0 else begun
            self.rows.append(("communication", message.name, since, self._now, message.bytes))
        del self._queue[:count]

    def _advance(self, start: float, seconds: float, speed: float) -> None:
        """Let messages proceed for a while at a share of their speed."""
        clock, end = start, start + seconds
        while self._queue and speed > 0:
            message, begun, left = self._queue[0]
            begun = clock if begun < 0 else begun
            if clock + left / speed > end + 1e-15 * max(1.0, end):
                self._queue[0] = (message, begun, left - (end - clock) * speed)
                return
            clock += left / speed
            self.rows.append(("communication", message.name, begun, clock, message.bytes))
            self._queue.pop(0)
