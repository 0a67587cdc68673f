"""The event loop: order of equal times, no past."""

from __future__ import annotations

import pytest

from drumline.simulator import EventLoop


def test_events_run_by_time_then_priority_then_insertion() -> None:
    loop, seen = EventLoop(), []
    for time, priority, name in [(2, 0, "e"), (1, 1, "c"), (1, 0, "a"), (1, 0, "b"), (1, 1, "d")]:
        loop.at(time, lambda name=name: seen.append((loop.now, name)), priority=priority)  # type: ignore[misc]
    assert loop.run() == 2
    assert seen == [(1, "a"), (1, "b"), (1, "c"), (1, "d"), (2, "e")]


def test_events_schedule_events() -> None:
    loop, times = EventLoop(), []

    def tick() -> None:
        times.append(loop.now)
        if len(times) < 3:
            loop.after(1.5, tick)

    loop.after(1.0, tick)
    assert loop.run() == 4.0
    assert times == [1.0, 2.5, 4.0]


def test_events_in_the_past_are_refused() -> None:
    loop = EventLoop()
    loop.at(2.0, lambda: loop.at(1.0, lambda: None))
    with pytest.raises(AssertionError, match=r"an event at 1.0 when it is 2.0"):
        loop.run()
