"""The measured timeline of several ranks: on one clock where they share a host."""

from __future__ import annotations

from typing import Any

from drumline.core.timeline import Span
from drumline.loop.measured_timeline import measured_timeline


def result(rank: int, began: tuple[str, float] | None) -> dict[str, Any]:
    return {"spans": [Span(rank, "compute", "forward", 0.0, 1.0)], "probed": 2} | ({"began": began} if began else {})


def starts(*began: tuple[str, float] | None, meet: bool = True) -> list[float]:
    timeline = measured_timeline([result(rank, b) for rank, b in enumerate(began)], meet=meet)
    assert timeline.notes == ("step 2, recorded under the profiler, which slows it",)
    assert all(s.end - s.start == 1.0 for s in timeline.spans)
    return [s.start for s in timeline.spans]


def test_ranks_of_a_host_begin_as_far_apart_as_they_did() -> None:
    assert starts(("a", 7.25), ("a", 7.0), ("a", 7.5)) == [0.25, 0.0, 0.5]


def test_clocks_of_hosts_are_not_compared() -> None:
    assert starts(("a", 7.0), ("b", 900.5), ("b", 900.0)) == [0.0, 0.5, 0.0]


def test_ranks_that_do_not_meet_keep_their_own_start() -> None:
    assert starts(("a", 7.0), ("a", 90.0), meet=False) == [0.0, 0.0]
    assert starts(None, None) == [0.0, 0.0]
