"""A rank's two lanes in a replay. The compute lane runs layers in order; the communication lane runs messages in the
order in which they become ready. While both lanes are busy, messages proceed at the share `overlap` of their speed.
"""

from __future__ import annotations

from ..costs.traffic import Message


class Lanes:
    """Two clocks, and the messages that are on their way."""

    def __init__(self, overlap: float, start: float = 0.0) -> None:
        self.spans: list[tuple[str, str, float, float, float]] = []
        self._overlap = overlap
        self._now = start
        self._queue: list[tuple[Message, float, float]] = []
        """Message, when it started (or -1), seconds of it that are left when it runs alone."""

    def compute(self, name: str, seconds: float) -> None:
        """Run something on the compute lane; messages proceed meanwhile."""
        if seconds <= 0:
            return
        start, self._now = self._now, self._now + seconds
        self.spans.append(("compute", name, start, self._now, 0.0))
        self._advance(start, seconds, self._overlap)

    def hold(self, name: str, seconds: float) -> None:
        """Wait for something that messages of the other lane do not pass meanwhile: it is a message itself."""
        if seconds > 0:
            start, self._now = self._now, self._now + seconds
            self.spans.append(("communication", name, start, self._now, 0.0))

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
