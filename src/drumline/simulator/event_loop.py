"""The event loop: a heap of (time, priority, counter, event), so that equal times always happen in the same order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class EventLoop:
    """Simulated time. Events are functions; an event may schedule others, never in the past."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Event]] = []
        self._counter = 0
        self._now = 0.0

    @property
    def now(self) -> float:
        """The time of the event that is running, in seconds."""
        return self._now

    def at(self, time: float, event: Event, *, priority: int = 0) -> None:
        """Let `event` happen at `time`; at equal times the lower priority first, then the one that was added first."""
        assert time >= self._now, f"an event at {time} when it is {self._now}"
        heapq.heappush(self._heap, (time, priority, self._counter, event))
        self._counter += 1

    def after(self, delay: float, event: Event, *, priority: int = 0) -> None:
        """Let `event` happen `delay` seconds from now."""
        self.at(self._now + delay, event, priority=priority)

    def run(self) -> float:
        """Let everything happen; the time of the last event."""
        while self._heap:
            self._now, _, _, event = heapq.heappop(self._heap)
            event()
        return self._now
