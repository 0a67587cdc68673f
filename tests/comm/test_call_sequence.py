"""Calls that repeat earlier ones are known; a call that deviates is found, whatever the length of the loop."""

from __future__ import annotations

import pytest

from drumline.comm.call_sequence import CONTEXT, PATIENCE, RARE, SETTLED, CallSequence, Judgement


def run(sequence: CallSequence, calls: list[int], site: int = 7) -> list[Judgement]:
    """Make calls of which all ranks made the same, from one line."""
    judged = []
    for call in calls:
        judgement = sequence.judge(call, site)
        judged.append(judgement)
        if judgement is not Judgement.KNOWN:
            sequence.learn(call, site)
        sequence.advance(call)
    return judged


@pytest.mark.parametrize("loop", [[1], [1, 2, 3], [5] * 20 + [6], list(range(1, 200))])
def test_a_loop_is_known_after_its_context_is_full(loop: list[int]) -> None:
    sequence = CallSequence()
    run(sequence, [99, 98, *loop * (2 + CONTEXT // len(loop)), *loop])
    assert set(run(sequence, loop * 3)) == {Judgement.KNOWN}


@pytest.mark.parametrize("wrong", [[1, 3], [1, 2, 2], [2], [1, 2, 3, 3], [4]])
def test_a_missing_extra_or_swapped_call_deviates(wrong: list[int]) -> None:
    sequence = CallSequence()
    run(sequence, [1, 2, 3] * CONTEXT)
    assert run(sequence, wrong)[-1] is Judgement.DEVIATES


def test_a_context_that_varies_often_is_always_compared() -> None:
    sequence = CallSequence()
    run(sequence, [1, 2] * CONTEXT)
    for _ in range(3):
        run(sequence, [9])
        run(sequence, [1, 2] * (CONTEXT // 2 + RARE // 2))
    assert run(sequence, [1])[0] is Judgement.COMPARE
    run(sequence, [2])
    assert run(sequence, [9])[0] is Judgement.COMPARE


def test_a_rare_call_deviates_each_time_and_the_usual_one_stays_known() -> None:
    """What a vote or a save in every hundredth step looks like."""
    sequence = CallSequence()
    step = [1, 2, 3]
    run(sequence, step * (CONTEXT + RARE))
    for _ in range(3):
        assert run(sequence, [9])[0] is Judgement.DEVIATES
        run(sequence, step * CONTEXT)  # the first time, what follows the rare call is new
        assert set(run(sequence, step * RARE)) == {Judgement.KNOWN}
    assert run(sequence, [8])[0] is Judgement.DEVIATES, "another call in its place"


def test_a_context_that_has_varied_settles() -> None:
    sequence = CallSequence()
    run(sequence, [1] * 2 * CONTEXT)
    for _ in range(3):
        run(sequence, [9] + [1] * (CONTEXT + 2))
    assert run(sequence, [1])[0] is Judgement.COMPARE
    run(sequence, [1] * SETTLED)
    assert run(sequence, [1])[0] is Judgement.KNOWN
    assert run(sequence, [9])[0] is Judgement.DEVIATES


def test_following_the_expected_call_is_the_same_as_judging_it() -> None:
    judged, followed = CallSequence(), CallSequence()
    loop = [1, 2, 2, 3]
    run(judged, loop * CONTEXT)
    run(followed, loop * CONTEXT)
    run(judged, loop * CONTEXT)
    for call in loop * CONTEXT:
        assert followed.expected is not None and followed.expected.call == call
        followed.follow(followed.expected)
    for call in [*loop, 9, *loop * CONTEXT, 9]:
        assert run(judged, [call]) == run(followed, [call])


def test_another_line_deviates_until_it_is_excused() -> None:
    sequence = CallSequence()
    run(sequence, [1] * 2 * CONTEXT)
    for _ in range(PATIENCE):
        assert sequence.judge(1, 8) is Judgement.DEVIATES
        sequence.excuse(1)
    assert sequence.judge(1, 8) is Judgement.KNOWN


def test_lines_that_differed_between_ranks_are_not_held_against_a_rank() -> None:
    sequence = CallSequence()
    for _ in range(2 * CONTEXT):
        sequence.learn(1, 0)
        sequence.advance(1)
    assert sequence.judge(1, 8) is Judgement.KNOWN
