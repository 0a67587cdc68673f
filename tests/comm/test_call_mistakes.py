"""Different calls are refused on every rank within a second, both lines named, on every backend of ours (N1)."""

from __future__ import annotations

import functools
import re

import call_mistakes
import pytest
from world import World

WARM = 40
"""Rounds after which gloo compares calls only where they deviate."""


def check(ranks: World, kind: str, backend: str, rounds: int) -> None:
    answers = ranks.run(call_mistakes.make, kind, backend, rounds, timeout=30)
    for seconds, name, text in answers:
        assert name == "GroupInputError", text
        assert seconds < 1.0
        assert "ranks made different calls" in text or "in a different order" in text
        assert f"rank {ranks.size - 1}: " in text and re.search("ranks? 0", text) and "call_mistakes.py:" in text


@pytest.mark.alone  # an error must appear within a second
@pytest.mark.parametrize("rounds", [0, WARM])
@pytest.mark.parametrize("backend", ["shm", "checked_gloo"])
@pytest.mark.parametrize("kind", list(call_mistakes.MISTAKES))
def test_n1_a_mistake_is_refused_on_all_ranks(world, kind: str, backend: str, rounds: int) -> None:
    check(world(2), kind, backend, rounds)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("rounds", [0, WARM])
@pytest.mark.parametrize("backend", ["shm", "checked_gloo"])
@pytest.mark.parametrize("kind", list(call_mistakes.MISTAKES))
def test_n1_with_three_ranks(world, kind: str, backend: str, rounds: int) -> None:
    check(world(3), kind, backend, rounds)


@pytest.mark.parametrize("backend", ["shm", "checked_gloo"])
def test_n1_named_tensors_of_one_line_in_another_order_are_refused(world, backend: str) -> None:
    for rounds in world(2).run(functools.partial(call_mistakes.one_line, named=True), backend, ["ba"]):
        assert "ranks made different calls" in rounds[-1][0]
        assert "name=a" in rounds[-1][0] and "name=b" in rounds[-1][0]


def test_n1_tensors_of_one_line_whose_order_changes_are_refused(world) -> None:
    """Without names, over shm: the order of the first round counts, and a later change of it is found."""
    for rounds in world(2).run(functools.partial(call_mistakes.one_line, named=False), "shm", ["ab", "ab", "ba"]):
        assert [error for error, _ in rounds[:2]] == ["", ""] and rounds[1][1] == [2.0, 200.0]
        assert "in a different order (one line, with its tensors in another order)" in rounds[2][0]


@pytest.mark.alone  # an error must appear within a second
def test_n1_a_call_that_is_made_now_and_then(world) -> None:
    """Such calls leave nothing in the store, and a rank that leaves one out is refused."""
    for left, seconds, text in world(2).run(call_mistakes.now_and_then, 80, 5):
        assert left == 0
        assert seconds < 1.0
        assert "ranks made different calls" in text and "all_reduce float32 (11)" in text


@pytest.mark.alone  # an error must appear long before the timeout
def test_n1_a_call_behind_many_open_ones_is_refused(world) -> None:
    """The ranks that wait in two hundred asynchronous calls answer about one of them, and get the same error."""
    for seconds, name, text in world(2).run(call_mistakes.among_open_calls, 200, timeout=30):
        assert name == "GroupInputError", text
        assert seconds < 5.0
        assert "ranks made different calls" in text and "all_reduce float32 (9)" in text, text


@pytest.mark.alone  # an error must appear within a second
def test_n1_a_call_in_place_of_a_bucket_of_ddp_is_refused() -> None:
    """DDP waits for gloo's own future, so its rank gets gloo's error; the rank that deviates says what differs.

    On ranks of its own: where calls were once made on behalf of another line, places are no longer recognized by code.
    """
    own = World(2)
    try:
        *others, (_, seconds, name, text) = own.run(call_mistakes.ddp_then_another_call, 150, timeout=30)
    finally:
        own.stop()
    assert name == "GroupInputError" and "ranks made different calls" in text and "all_reduce float32 (9)" in text, text
    assert "all_reduce float32 (16)" in text and seconds < 1.0
    for recognized, seconds, name, _ in others:
        assert recognized and seconds < 1.0 and name == "RuntimeError"


def test_calls_that_are_open_when_a_group_ends_are_no_waits(world) -> None:
    """Later verbs in the same process would look as if they waited for another rank."""
    (before, after), _ = world(2).run(call_mistakes.open_at_the_end)
    assert before and not after


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_n1_buckets_in_another_order_are_refused(backend: str) -> None:
    own = World(2, backend)
    try:
        for text in own.run(call_mistakes.swapped_buckets, backend, "dp=2,zero=1"):
            assert "ranks made different calls" in text and "name=1.weight" in text and "name=2.weight" in text
    finally:
        own.stop()
