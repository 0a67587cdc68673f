"""Replays: collectives against prices on idle networks, pipelines against theory."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from drumline.clusters import Link
from drumline.core.errors import InputError
from drumline.costs.collectives import price
from drumline.schedules import (
    ALGORITHMS,
    Action,
    Pipeline,
    Send,
    collective_schedule,
    one_f_one_b,
    ring_all_reduce,
    segmented,
)
from drumline.simulator import bubble, replay, replay_pipeline
from drumline.theory.alpha_beta import NodeTopology
from drumline.theory.collective_forms import CLOSED_FORMS, RUNS_AHEAD

LINK = Link(3e-6, 1.1e9)
NAMES = [(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms]


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("k", [0, 1, 700])
def test_on_an_idle_network_the_replay_equals_the_closed_form(collective: str, algorithm: str, p: int, k: int) -> None:
    schedule = collective_schedule(collective, algorithm, p, root=p // 2)
    m = k * schedule.chunks
    closed, seconds = CLOSED_FORMS[collective, algorithm](p, m, LINK), replay(schedule, m, LINK).seconds
    if (collective, algorithm) in RUNS_AHEAD and p & (p - 1):
        assert seconds <= closed * (1 + 1e-12)
    else:
        assert seconds == pytest.approx(closed, rel=1e-12, abs=0)


def test_algorithms_that_run_ahead_do() -> None:
    """Each of RUNS_AHEAD is in it for a reason."""
    for collective, algorithm in RUNS_AHEAD:
        schedules = [collective_schedule(collective, algorithm, p) for p in range(3, 18)]
        # Five elements: some chunks are empty, so ranks have less to wait for.
        sooner = [replay(s, 5, LINK).seconds < (1 - 1e-6) * price(s, 5, LINK) for s in schedules]
        assert any(sooner)


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
@pytest.mark.parametrize("n", [2, 5])
def test_segments_end_no_later_than_their_price(collective: str, algorithm: str, n: int) -> None:
    """A window of rounds may have messages of different sizes, which leave gaps on ports."""
    for p in (2, 5, 8):
        schedule = segmented(collective_schedule(collective, algorithm, p), n)
        m = 100 * schedule.chunks
        seconds, priced = replay(schedule, m, LINK).seconds, price(schedule, m, LINK)
        assert 0 < seconds <= (1 if schedule.fan_in == 1 else 1.5) * priced * (1 + 1e-12)


def test_no_message_shares_a_port_with_another() -> None:
    for collective, algorithm in NAMES:
        schedule = collective_schedule(collective, algorithm, 6, per_node=3)
        spans = replay(schedule, 64 * schedule.chunks, LINK).spans
        for end in (0, 1):
            ports: dict[str, list[tuple[float, float]]] = {}
            for span in spans:
                ports.setdefault(span.name.split(": ")[1].split("->")[end], []).append((span.start, span.end))
            for times in ports.values():
                ordered = sorted(times)
                assert all(a[1] <= b[0] + 1e-15 for a, b in itertools.pairwise(ordered))


def test_spans_are_messages() -> None:
    timeline = replay(ring_all_reduce(2), 10, Link(1, 1))
    assert timeline.origin == "predicted"
    assert {s.lane for s in timeline.spans} == {"link"}
    assert [(s.rank, s.name, s.start, s.end, s.bytes) for s in timeline.spans] == [
        (0, "round 0: 0->1", 0, 6, 5),
        (1, "round 0: 1->0", 0, 6, 5),
        (0, "round 1: 0->1", 6, 12, 5),
        (1, "round 1: 1->0", 6, 12, 5),
    ]


def test_several_messages_of_one_rank_follow_each_other() -> None:
    sends = tuple(Send(src, 0, 0, True) for src in (1, 2, 3))
    gather = dataclasses.replace(ring_all_reduce(4), chunks=1, rounds=(sends,))
    assert replay(gather, 4, Link(1, 1)).seconds == 15 == price(gather, 4, Link(1, 1))


def test_ranks_of_a_node_share_its_port() -> None:
    nodes = NodeTopology(2, Link(1, 1), Link(10, 0.25))
    rails = (Send(0, 2, 0, True), Send(1, 3, 0, True), Send(2, 0, 0, True), Send(3, 1, 0, True))
    exchange = dataclasses.replace(ring_all_reduce(4), chunks=1, rounds=(rails,))
    assert replay(exchange, 3, nodes).seconds == 10 + 2 * 12 == price(exchange, 3, nodes)


def test_ranks_run_ahead_where_rounds_allow_it() -> None:
    """Ranks 2 and 3 need not wait for the long message of ranks 0 and 1: faster than the price by rounds."""
    rounds = ((Send(0, 1, 0, True), Send(2, 3, 1, True)), (Send(0, 1, 1, True), Send(2, 3, 0, True)))
    lopsided = dataclasses.replace(
        ring_all_reduce(4), chunks=2, rounds=rounds, split=lambda n, chunks: ((0, n - 1), (n - 1, n))
    )
    link = Link(1, 1)
    assert price(lopsided, 10, link) == 2 * 10
    assert replay(lopsided, 10, link).seconds == 10 + 2


def test_the_slowest_pair_decides() -> None:
    def between(src: int, dst: int) -> Link:
        return Link(5, 1) if src == 3 else Link(1, 1)

    schedule = ring_all_reduce(4)
    assert replay(schedule, 4, between).seconds <= price(schedule, 4, between) == 6 * 6
    assert replay(schedule, 4, between).seconds > replay(schedule, 4, Link(1, 1)).seconds == 6 * 2


def test_the_replay_is_deterministic() -> None:
    assert replay(ring_all_reduce(6), 100, LINK) == replay(ring_all_reduce(6), 100, LINK)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 4, 7, 16])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.0, 2.0), (0.3, 0.7)])
def test_the_bubble_of_1f1b(stages: int, micros: int, forward: float, backward: float) -> None:
    timeline = replay_pipeline(one_f_one_b(stages, micros), forward=forward, backward=backward)
    assert timeline.seconds == pytest.approx((micros + stages - 1) * (forward + backward), rel=1e-12)
    assert bubble(timeline) == pytest.approx((stages - 1) / (micros + stages - 1), rel=1e-12, abs=1e-12)
    assert len(timeline.spans) == 2 * stages * micros


def test_transfers_are_between_stages() -> None:
    timeline = replay_pipeline(one_f_one_b(2, 1), forward=1, backward=2, transfer=0.5)
    assert [(s.rank, s.lane, s.name, s.start, s.end) for s in sorted(timeline.spans, key=lambda s: s.start)] == [
        (0, "compute", "F0", 0, 1),
        (0, "link", "F0 0->1", 1, 1.5),
        (1, "compute", "F0", 1.5, 2.5),
        (1, "compute", "B0", 2.5, 4.5),
        (1, "link", "B0 1->0", 4.5, 5),
        (0, "compute", "B0", 5, 7),
    ]


def test_transfers_of_one_link_follow_each_other() -> None:
    timeline = replay_pipeline(one_f_one_b(2, 4), forward=1, backward=1, transfer=3)
    link = sorted((s.start, s.end) for s in timeline.spans if s.name.endswith("0->1"))
    assert all(start >= end for (_, end), (start, _) in itertools.pairwise(link))


def test_stages_may_differ_and_the_slowest_decides() -> None:
    timeline = replay_pipeline(one_f_one_b(3, 50), forward=(1, 2, 1), backward=(2, 4, 2))
    assert timeline.busy_seconds(1, "compute") == 50 * 6
    # Before it the first forward (1) of stage 0, after it the last backward (2), and it waits once, for B0 (1).
    assert timeline.seconds == 1 + 50 * 6 + 1 + 2


def test_a_rank_with_two_stages_sends_no_message_to_itself() -> None:
    lane = tuple(Action(kind, stage, 0) for kind, stage in (("F", 0), ("F", 1), ("B", 1), ("B", 0), ("W", 1), ("W", 0)))
    timeline = replay_pipeline(Pipeline("by hand", 2, 1, (lane,)), forward=1, backward=1, weight=2, transfer=5)
    assert [s.name for s in timeline.spans] == ["F0@0", "F0@1", "B0@1", "B0@0", "W0@1", "W0@0"]
    assert timeline.seconds == 8


def test_wrong_calls() -> None:
    with pytest.raises(InputError, match=r"2 forward times for 3 stages\n.*one per stage"):
        replay_pipeline(one_f_one_b(3, 2), forward=(1, 2), backward=1)
    with pytest.raises(InputError, match=r"backward times -1.0(.|\n)*not negative"):
        replay_pipeline(one_f_one_b(1, 2), forward=1, backward=-1)
    stuck = Pipeline("by hand", 1, 1, ((Action("B", 0, 0), Action("F", 0, 0)),))
    with pytest.raises(InputError, match="by hand deadlocks on rank 0"):
        replay_pipeline(stuck, forward=1, backward=1)
