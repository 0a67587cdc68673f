"""Replays one step of a plan as events: the predicted timeline, with the same rules as the closed form.

A rank has two lanes. The compute lane runs layers in order; the communication lane runs messages in the order in which
they become ready. While both lanes are busy, messages proceed at the share `overlap` of their speed.
"""

from __future__ import annotations

from ..cluster import Cluster
from ..cost.collectives import collective_seconds
from ..cost.estimate import Estimate
from ..cost.host import as_it_runs
from ..cost.step import LayerTime, added_on_host, asked_ahead, layer_times, statistics_seconds
from ..cost.traffic import Message, after_backward, after_update, reduced_often
from ..model.profile import Profile
from ..plan import Plan
from ..timeline import Span, Timeline


def simulate_step(
    profile: Profile, plan: Plan, cluster: Cluster, estimate: Estimate, *, speed: float = 1.0
) -> Timeline:
    """The predicted timeline of one step; all ranks of a data-parallel plan do the same.

    With a `speed`, of a machine that runs at that share of its measured speed; the estimate has it already.
    """
    lanes = _Lanes(cluster.overlap)
    plan = as_it_runs(plan, cluster)
    times = layer_times(profile, plan, cluster)
    for micro in range(plan.micro):
        _micro_batch(
            lanes, times, reduces=reduced_often(plan) or micro == plan.micro - 1, ahead=asked_ahead(plan, cluster),
            label=f" m{micro}" if plan.micro > 1 else "",
        )  # fmt: skip
        if reduced_often(plan):
            lanes.join()
        if plan.zero == 3:
            lanes.compute("communication units", cluster.unit * sum(1 for t in times if t.gather))
        for t in times:
            lanes.compute(f"communication statistics {t.layer.name}", statistics_seconds(t.layer, plan, cluster))
    for message in after_backward(profile, plan, cluster):
        lanes.send(message)
    lanes.join()
    lanes.compute("communication host", added_on_host(profile, plan, cluster))
    if plan.dp > 1:
        lanes.compute("communication loss", collective_seconds("all_reduce", plan.dp, 16, cluster))
    lanes.compute("optimizer", estimate.parts["optimizer"] * speed)
    for message in after_update(profile, plan, cluster):
        lanes.send(message)
    lanes.join()
    spans = tuple(
        Span(rank, lane, name, start / speed, end / speed, size)
        for rank in range(plan.dp)
        for lane, name, start, end, size in lanes.spans
    )
    return Timeline("predicted", spans)


def _micro_batch(lanes: _Lanes, times: list[LayerTime], *, reduces: bool, ahead: tuple[bool, bool], label: str) -> None:
    """Forward through the layers, backward from the last to the first; each with the messages that belong to it.

    Parameters are asked for one layer ahead where `ahead` says so, of the forward and of the backward.
    """
    forward_ahead, backward_ahead = ahead
    for i, t in enumerate(times):
        if not backward_ahead:
            lanes.copy(t.gather)
        elif i == 0 or not forward_ahead:
            lanes.send(t.gather)
        lanes.wait(t.gather)
        if forward_ahead and i + 1 < len(times):
            lanes.send(times[i + 1].gather)
        lanes.compute(f"forward {t.layer.name or '(model)'}{label}", t.forward)
    for i, t in reversed(list(enumerate(times))):
        # the group of the whole model, which comes with the first layer, is still there
        if i > 0 and not backward_ahead:
            lanes.copy(t.gather)
        elif i > 0 and i == len(times) - 1:
            lanes.send(t.gather)
        if i > 0:
            lanes.wait(t.gather)
        if i > 1 and backward_ahead:
            lanes.send(times[i - 1].gather)
        lanes.compute(f"backward {t.layer.name or '(model)'}{label}", t.backward)
        if reduces:
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

    def send(self, message: Message | None) -> None:
        """Put a message, if there is one, on the communication lane."""
        if message is not None:
            self._queue.append((message, -1.0, message.seconds))

    def copy(self, message: Message | None) -> None:
        """Let the compute lane itself do what a message stands for: a copy that nothing was asked for ahead."""
        if message is not None:
            self.compute(f"communication {message.name}", message.seconds)

    def wait(self, message: Message | None) -> None:
        """Wait until a message has arrived, and so all before it; the compute lane is idle meanwhile."""
        places = [i for i, (queued, _, _) in enumerate(self._queue) if queued is message]
        if message is not None and places:
            self._let_pass(places[-1] + 1)

    def join(self) -> None:
        """Wait until all messages have arrived."""
        self._let_pass(len(self._queue))

    def _let_pass(self, count: int) -> None:
        """Messages run at full speed while the compute lane waits for the first `count` of them."""
        for message, begun, left in self._queue[:count]:
            start, self._now = self._now, self._now + left
            since = start if begun < 0 else begun
            self.spans.append(("communication", message.name, since, self._now, message.bytes))
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
            self.spans.append(("communication", message.name, begun, clock, message.bytes))
            self._queue.pop(0)
