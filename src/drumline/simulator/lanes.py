"""The lanes of a rank while its step is laid out in time: a clock, and the messages in flight.

The compute lane runs layers in order; the communication lane runs messages in the order in which they become ready.
While both are busy, messages proceed at the share `overlap` of their speed.
"""

from __future__ import annotations

from typing import Protocol

from ..costs.data_parallel_comm import CollectiveMessage
from ..theory.alpha_beta import Port
from .message_flows import Flow

Row = tuple[str, str, float, float, float]
"""Lane, name, start, end, bytes."""


Phase = tuple[int, int]
"""The place of a layer in the order of the forward; 0 for its forward, 1 for its backward."""


class MessageFlows(Protocol):
    """The links that messages of a rank occupy."""

    def waited(self, phase: Phase, seconds: float) -> Flow:
        """A message that a layer waits for."""

    def in_flight(self, message: CollectiveMessage) -> Flow:
        """A collective of replicas."""


class Lanes:
    """The two lanes of a rank: a clock, and the messages in flight."""

    def __init__(self, overlap: float, start: float = 0.0, *, flows: MessageFlows | None = None) -> None:
        self._flows = flows
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

    def block(self, name: str, seconds: float, of: Phase | None = None) -> None:
        """Wait for a message of the layer itself.

        Those in flight stand still meanwhile, unless it is known which links both occupy: then they share these.
        """
        if seconds > 0:
            start, both = self._now, self._shared(seconds, of)
            self._now += seconds + both
            self.rows.append(("communication", name, start, self._now, 0.0))
            self._advance(self._now - both, both, 1.0)

    def _shared(self, seconds: float, of: Phase | None) -> float:
        """Seconds of links that a layer's message needs while messages in flight need them too.

        Each then has half of a link: the layer waits longer by as much as the others proceed.
        """
        if self._flows is None or of is None or not self._queue:
            return 0.0
        own = self._flows.waited(of, seconds)
        ahead = [(self._flows.in_flight(message), left) for message, _, left in self._queue]
        occupied = {port for flow, _ in ahead for port in flow.ports}
        return min(_seconds_on(own, occupied), sum(min(left, _seconds_on(flow, own.ports)) for flow, left in ahead))

    def send(self, message: CollectiveMessage | None) -> None:
        """Put a message, if there is one, on the communication lane."""
        if message is not None:
            self._queue.append((message, -1.0, message.seconds))

    def copy(self, message: CollectiveMessage | None) -> None:
        """Do the work of a message on the compute lane: a copy on demand."""
        if message is not None:
            self.compute(f"copy {message.name}", message.seconds)

    def wait(self, message: CollectiveMessage | None) -> None:
        """Wait until a message has arrived, and so all before it; the compute lane is idle meanwhile."""
        places = [i for i, (queued, _, _) in enumerate(self._queue) if queued is message]
        if message is not None and places:
            self._drain(places[-1] + 1)

    def wait_until(self, moment: float) -> None:
        """Let the compute lane be idle until a moment, if that is not over."""
        self._now = max(self._now, moment)

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


def _seconds_on(flow: Flow, ports: set[Port]) -> float:
    """Seconds for which a message occupies some of these ports."""
    return sum(leg.seconds for leg in flow.legs if not ports.isdisjoint(leg.ports))
