"""Drawings of schedules, pinned, and narrow."""

from __future__ import annotations

import dataclasses

import pytest

from drumline.report.draw import draw_collective, draw_pipeline
from drumline.schedule import (
    Action,
    Pipeline,
    Send,
    binomial_broadcast,
    one_f_one_b,
    ring_all_gather,
    ring_all_reduce,
)


def test_a_ring() -> None:
    assert draw_collective(ring_all_reduce(3)) == """\
ring_all_reduce, p = 3, 3 chunks
a->b +c: b adds chunk c; =c: b keeps it
0: 0->1 +2  1->2 +0  2->0 +1
1: 0->1 +1  1->2 +2  2->0 +0
2: 0->1 =0  1->2 =1  2->0 =2
3: 0->1 =2  1->2 =0  2->0 =1"""


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


def test_a_pipeline() -> None:
    assert draw_pipeline(one_f_one_b(3, 3)) == """\
1f1b, 3 stages, 3 micro-batches
stage 0 F0 F1 F2 .  .  B0 .  B1 .  B2
stage 1 .  F0 F1 .  B0 F2 B1 .  B2 .
stage 2 .  .  F0 B0 F1 B1 F2 B2 .  ."""


def test_a_long_pipeline_goes_on_below() -> None:
    lines = draw_pipeline(one_f_one_b(2, 12)).splitlines()
    heads = [line for line in lines if line.startswith("time")]
    assert heads == ["time 0 to 8", "time 8 to 16", "time 16 to 24", "time 24 to 26"]
    row = " ".join(line.removeprefix("stage 1") for line in lines if line.startswith("stage 1"))
    assert row.split() == [".", *(f"{kind}{i}" for i in range(12) for kind in "FB"), "."]


def test_a_rank_with_several_stages_names_them() -> None:
    lane = tuple(Action(kind, stage, 0) for kind, stage in (("F", 0), ("F", 1), ("B", 1), ("B", 0)))
    assert draw_pipeline(Pipeline("by hand", 2, 1, (lane,))).endswith("rank 0 F0@0 F0@1 B0@1 B0@0")


@pytest.mark.parametrize("p", [1, 2, 5, 12, 40])
def test_forty_columns_suffice(p: int) -> None:
    collectives = [draw_collective(s) for s in (ring_all_reduce(p), binomial_broadcast(p))]
    drawings = [*collectives, draw_pipeline(one_f_one_b(p, 9))]
    assert max(len(line) for text in drawings for line in text.splitlines()) <= 40
    assert draw_collective(ring_all_reduce(p)).count("->") == 2 * p * (p - 1) + 1
