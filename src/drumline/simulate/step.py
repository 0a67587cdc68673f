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


def simulate_step(
    profile: Profile, plan: Plan, cluster: Cluster, estimate: Estimate, *, speed: float = 1.0
) -> Timeline:
    """The predicted timeline of one step; all ranks of a data-parallel plan do the same.

    With a `speed`, of a machine that runs at that share of its measured speed; the estimate has it already.
    """
    lanes = _Lanes(cluster.overlap)
    times = layer_times(profile, plan, cluster)
    for micro in range(plan.micro):
        _micro_batch(
            lanes, times, reduces=plan.zero == 3 or micro == plan.micro - 1, ahead=cluster.device.kind == "cuda",
            label=f" m{micro}" if plan.micro > 1 else "",
        )  # fmt: skip
        if plan.zero == 3:
            lanes.join()
            lanes.compute("communication units", cluster.unit * sum(1 for t in times if t.gather))
        for t in times:
            lanes.compute(f"communication statistics {t.layer.name}", statistics_seconds(t.layer, plan, cluster))
    lanes.join()
    if plan.dp > 1:
        lanes.compute("communication loss", collective_seconds("all_reduce", plan.dp, 16, cluster))
    lanes.compute("optimizer", estimate.parts["optimizer"] * speed)
    spans = tuple(
        Span(rank, lane, name, start / speed, end / speed, size)
        for rank in range(plan.dp)
        for lane, name, start, end, size in lanes.spans
    )
    return Timeline("predicted", spans)


def _micro_batch(lanes: _Lanes, times: list[LayerTime], *, reduces: bool, ahead: bool, label: str) -> None:
    """Forward through the layers, backward from the last to the first; each with the messages that belong to it.

    Parameters are asked for one layer ahead: in the backward always, in the forward where the device runs `ahead`.
    """
    for i, t in enumerate(times):
        if i == 0 or not ahead:
            lanes.send(t.gather)
        lanes.wait(t.gather)
        if ahead and i + 1 < len(times):
            lanes.send(times[i + 1].gather)
        lanes.compute(f"forward {t.layer.name or '(model)'}{label}", t.forward)
    for i, t in reversed(list(enumerate(times))):
        # the group of the whole model, which comes with the first layer, is still there
        if i == len(times) - 1 and i > 0:
            lanes.send(t.gather)
        if i > 0:
            lanes.wait(t.gather)
        if i > 1:
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
        rest = self._queue[count:]
        del self._queue[count:]
        left = sum(left for _, _, left in self._queue)
        start, self._now = self._now, self._now + left
        self._advance(start, left, 1.0)
        assert not self._queue
        self._queue = rest

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
