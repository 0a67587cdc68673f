"""Replays one step of a plan as events: the predicted timeline, with the same rules as the closed form.

A rank has two lanes. The compute lane runs layers in order; the communication lane runs messages in the order in which
they become ready. While both lanes are busy, messages proceed at the share `overlap` of their speed.
"""

from __future__ import annotations

from ..cluster import Cluster
from ..cost.collectives import collective_seconds
from ..cost.estimate import Estimate
from ..cost.step import LayerTime, Message, layer_times, statistics_seconds
from ..model.profile import Profile
from ..plan import Plan
from ..timeline import Span, Timeline


def simulate_step(profile: Profile, plan: Plan, cluster: Cluster, estimate: Estimate) -> Timeline:
    """The predicted timeline of one step; all ranks of a data-parallel plan do the same."""
    lanes = _Lanes(cluster.overlap)
    times = layer_times(profile, plan, cluster)
    for micro in range(plan.micro):
        _micro_batch(lanes, times, plan, last=micro == plan.micro - 1, label=f" m{micro}" if plan.micro > 1 else "")
        for t in times:
            lanes.compute(f"communication statistics {t.layer.name}", statistics_seconds(t.layer, plan, cluster))
    lanes.join()
    if plan.dp > 1:
        lanes.compute("communication loss", collective_seconds("all_reduce", plan.dp, 16, cluster))
    lanes.compute("optimizer", estimate.parts["optimizer"])
    spans = tuple(
        Span(rank, lane, name, start, end, size)
        for rank in range(plan.dp)
        for lane, name, start, end, size in lanes.spans
    )
    return Timeline("predicted", spans)


def _micro_batch(lanes: _Lanes, times: list[LayerTime], plan: Plan, *, last: bool, label: str) -> None:
    """Forward through the layers, backward from the last to the first; each with the messages that belong to it."""
    for t in times:
        if t.gather:
            lanes.wait_for(t.gather)
        lanes.compute(f"forward {t.layer.name or '(model)'}{label}", t.forward)
    for i, t in reversed(list(enumerate(times))):
        if t.gather and i > 0:  # the group of the whole model, with the first layer, stays gathered
            lanes.wait_for(t.gather)
        lanes.compute(f"backward {t.layer.name or '(model)'}{label}", t.backward)
        if t.reduce and (last or plan.zero == 3):
            lanes.send(t.reduce)


class _Lanes:
    """Two clocks, and the messages that are on their way."""

    def __init__(self, overlap: float) -> None:
        self.spans: list[tuple[str, str, float, float, float]] = []
        self._overlap = overlap
        self._now = 0.0
        self._queue: list[tuple[Message, float, float]] = []
        """Message, when it started (or -1), seconds of it that are left when it runs alone."""

    def compute(self, name: str, seconds: float) -> None:
        """Run something on the compute lane; messages proceed meanwhile."""
        if seconds <= 0:
            return
        start, self._now = self._now, self._now + seconds
        self.spans.append(("compute", name, start, self._now, 0.0))
        self._advance(start, seconds, self._overlap)

    def send(self, message: Message) -> None:
        """Put a message on the communication lane."""
        self._queue.append((message, -1.0, message.seconds))

    def wait_for(self, message: Message) -> None:
        """Send a message that was asked for ahead, and wait for what of it could not be hidden."""
        self.send(message)
        self.join()

    def join(self) -> None:
        """Wait until all messages have arrived; the compute lane is idle and they run at full speed."""
        left = sum(left for _, _, left in self._queue)
        start, self._now = self._now, self._now + left
        self._advance(start, left, 1.0)
        assert not self._queue

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
            self.spans.append(("communication", message.name, begun, clock, message.bytes))
            self._queue.pop(0)
