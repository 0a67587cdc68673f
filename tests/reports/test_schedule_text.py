"""Drawings of schedules: pinned, and narrow."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.reports.schedule_text import draw_collective, draw_pipeline
from drumline.schedules import (
    ALGORITHMS,
    Action,
    Pipeline,
    Send,
    binomial_broadcast,
    bruck_all_to_all,
    collective_schedule,
    dissemination_barrier,
    halving_all_reduce,
    messages,
    one_f_one_b,
    ring_all_gather,
    ring_all_reduce,
    segmented,
)


def test_a_ring() -> None:
    assert (
        draw_collective(ring_all_reduce(3))
        == """\
ring_all_reduce, p = 3, 3 chunks
a->b +c: b adds chunk c; =c: b keeps it
0: 0->1 +2  1->2 +0  2->0 +1
1: 0->1 +1  1->2 +2  2->0 +0
2: 0->1 =0  1->2 =1  2->0 =2
3: 0->1 =2  1->2 =0  2->0 =1"""
    )


def test_a_tree_from_another_root() -> None:
    assert draw_collective(binomial_broadcast(6, root=2)).splitlines()[2:] == [
        "0: 2->3 =0",
        "1: 2->4 =0  3->5 =0",
        "2: 2->0 =0  3->1 =0",
    ]


def test_one_rank_and_several_chunks_in_a_message() -> None:
    assert draw_collective(ring_all_gather(1)).endswith("one rank: nothing to send")
    sends = (Send(0, 1, 0, True), Send(0, 1, 1, False), Send(0, 1, 2, True))
    drawing = draw_collective(dataclasses.replace(ring_all_reduce(3), rounds=(sends,)))
    assert drawing.endswith("0: 0->1 +0,2 =1")


def test_consecutive_chunks_are_written_as_a_range() -> None:
    assert draw_collective(halving_all_reduce(8)).splitlines()[2] == "0: 0->1 +4-7  1->0 +0-3  2->3 +4-7"
    sends = tuple(Send(0, 1, c, False) for c in (7, 0, 1, 2, 4, 5))
    drawing = draw_collective(dataclasses.replace(ring_all_reduce(8), rounds=(sends,)))
    assert drawing.endswith("0: 0->1 =7,0-2,4,5")


def test_a_barrier_has_no_data() -> None:
    assert (
        draw_collective(dissemination_barrier(4))
        == """\
dissemination_barrier, p = 4, no data
a->b: a signals b
0: 0->1  1->2  2->3  3->0
1: 0->2  1->3  2->0  3->1"""
    )


def test_an_all_to_all_explains_its_chunks() -> None:
    assert (
        draw_collective(bruck_all_to_all(3))
        == """\
bruck_all_to_all, p = 3, 9 chunks
a->b +c: b adds chunk c; =c: b keeps it
chunk c: rank c div 3 to rank c mod 3
0: 0->1 =1  1->2 =5  2->0 =6
1: 0->2 =2  1->0 =3  2->1 =7"""
    )
    assert "rank (c div 2) div 3" in " ".join(draw_collective(segmented(bruck_all_to_all(3), 2)).split())


def test_a_message_wider_than_the_screen_is_continued_below() -> None:
    sends = (*(Send(0, 1, c, False) for c in range(0, 40, 4)), Send(1, 0, 3, True))
    drawing = draw_collective(dataclasses.replace(ring_all_reduce(40), rounds=(sends,)), width=24)
    assert drawing.splitlines()[-3:] == [
        "0: 0->1 =0,4,8,12,16,20,",
        "     24,28,32,36",
        "   1->0 +3",
    ]


@pytest.mark.parametrize(("collective", "algorithm"), [(c, a) for c, known in ALGORITHMS.items() for a in known])
def test_every_collective_is_drawn_in_forty_columns(collective: str, algorithm: str) -> None:
    for p in (1, 2, 5, 8, 12):
        for n in (1, 3):
            schedule = segmented(collective_schedule(collective, algorithm, p, per_node=3), n)
            text = draw_collective(schedule)
            assert max(map(len, text.splitlines())) <= 40
            drawn = sum(len(messages(sends)) for sends in schedule.rounds)
            assert text.count("->") == drawn + 1  # one in the legend
            assert text.startswith(schedule.name)


def test_a_pipeline() -> None:
    assert (
        draw_pipeline(one_f_one_b(3, 3))
        == """\
1f1b, 3 stages, 3 micro-batches
stage 0 F0 F1 F2 .  .  B0 .  B1 .  B2
stage 1 .  F0 F1 .  B0 F2 B1 .  B2 .
stage 2 .  .  F0 B0 F1 B1 F2 B2 .  ."""
    )


def test_a_long_pipeline_is_continued_below() -> None:
    lines = draw_pipeline(one_f_one_b(2, 12)).splitlines()
    heads = [line for line in lines if line.startswith("time")]
    assert heads == ["time 0 to 8", "time 8 to 16", "time 16 to 24", "time 24 to 26"]
    row = " ".join(line.removeprefix("stage 1") for line in lines if line.startswith("stage 1"))
    assert row.split() == [".", *(f"{kind}{i}" for i in range(12) for kind in "FB"), "."]


def test_a_rank_with_several_stages_names_them() -> None:
    lane = tuple(Action(kind, stage, 0) for kind, stage in (("F", 0), ("F", 1), ("B", 1), ("B", 0)))
    assert draw_pipeline(Pipeline("by hand", 2, 1, (lane,))).endswith("rank 0 F0@0 F0@1 B0@1 B0@0")


@pytest.mark.parametrize("p", [1, 2, 5, 12, 40])
def test_pipelines_fit_forty_columns(p: int) -> None:
    collectives = [draw_collective(s) for s in (ring_all_reduce(p), binomial_broadcast(p))]
    drawings = [*collectives, draw_pipeline(one_f_one_b(p, 9))]
    assert max(len(line) for text in drawings for line in text.splitlines()) <= 40
    assert draw_collective(ring_all_reduce(p)).count("->") == 2 * p * (p - 1) + 1
