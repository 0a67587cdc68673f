"""1F1B is complete, cannot deadlock and keeps the activations of theory; broken schedules are detected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from drumline.core.errors import InputError, VerificationError
from drumline.schedules import Action, Pipeline, check_skips, one_f_one_b, pipeline_order, prove_pipeline


def mutate(pipeline: Pipeline, change: Callable[[list[list[Action]]], object]) -> Pipeline:
    """The schedule with other lanes."""
    lanes = [list(lane) for lane in pipeline.lanes]
    change(lanes)
    return dataclasses.replace(pipeline, lanes=tuple(map(tuple, lanes)))


def refused(pipeline: Pipeline) -> str:
    with pytest.raises(VerificationError) as caught:
        prove_pipeline(pipeline)
    return f"{caught.value.what} | {caught.value.where}"


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("micros", [1, 2, 3, 5, 8, 16])
def test_one_f_one_b_is_proved(stages: int, micros: int) -> None:
    proof = prove_pipeline(one_f_one_b(stages, micros))
    assert proof.in_flight == tuple(min(stages - s, micros) for s in range(stages))


def test_1f1b_as_in_the_paper() -> None:
    lanes = [" ".join(map(str, lane)) for lane in one_f_one_b(3, 4).lanes]
    assert lanes == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_missing_doubled_and_misplaced_actions_are_detected() -> None:
    good = one_f_one_b(3, 4)
    assert refused(mutate(good, lambda lanes: lanes[1].pop(2))) == "B0 of stage 1 is missing | 1f1b: rank 1"
    assert refused(mutate(good, lambda lanes: lanes[2].append(lanes[2][0]))) == (
        "F0 of stage 2 occurs twice | 1f1b: rank 2"
    )
    assert refused(mutate(good, lambda lanes: lanes[0].append(Action("F", 0, 4)))) == (
        "there is no F4 of stage 0 | 1f1b: rank 0"
    )
    assert refused(mutate(good, lambda lanes: lanes[1].append(lanes[0].pop()))) == (
        "B3 of stage 0 is in another lane than its stage | 1f1b: rank 1"
    )
    assert refused(mutate(good, lambda lanes: lanes[2].clear())) == "F0 of stage 2 is missing | 1f1b"


def test_a_deadlock_is_detected() -> None:
    def change(lanes: list[list[Action]]) -> None:
        lanes[0][2], lanes[0][3] = lanes[0][3], lanes[0][2]  # B0 before F2 is fine: its needs come
        lanes[2][0], lanes[2][1] = lanes[2][1], lanes[2][0]  # B0 before its own F0 is not

    assert refused(mutate(one_f_one_b(3, 4), change)) == (
        "deadlock: B0 of stage 2 waits for F0 of stage 2 | 1f1b: rank 2"
    )


def test_a_deadlock_between_ranks_is_detected() -> None:
    """Rank 0 waits for a backward before the forward that it needs."""

    def change(lanes: list[list[Action]]) -> None:
        lanes[0].remove(Action("B", 0, 1))
        lanes[0].insert(1, Action("B", 0, 1))

    with pytest.raises(VerificationError, match=r"deadlock: (.|\n)*rank 0 is at B1 of stage 0"):
        prove_pipeline(mutate(one_f_one_b(2, 3), change))


def test_split_backwards_and_several_stages_per_rank() -> None:
    """The form of interleaved and zero-bubble schedules: one rank, two stages, W actions."""
    F, B, W = (lambda s, kind=kind: Action(kind, s, 0) for kind in "FBW")
    lane = (F(0), F(1), B(1), B(0), W(1), W(0))
    order = Pipeline("by hand", 2, 1, (lane,))
    assert order.splits_backward
    assert order.label(lane[1]) == "F0@1"
    assert prove_pipeline(order).in_flight == (1, 1)
    assert prove_pipeline(order).activations == (2,)
    at_once = dataclasses.replace(order, lanes=((F(0), F(1), B(1), W(1), B(0), W(0)),))
    assert prove_pipeline(at_once).activations == (2,)
    two = Pipeline("by hand", 1, 2, (tuple(Action(k, 0, i) for k, i in (("F", 0), ("B", 0), ("F", 1), ("B", 1))),))
    assert prove_pipeline(two).activations == (1,)
    late = tuple(Action(k, 0, i) for k, i in (("F", 0), ("B", 0), ("F", 1), ("B", 1), ("W", 0), ("W", 1)))
    assert prove_pipeline(dataclasses.replace(two, lanes=(late,))).activations == (2,)  # until W
    assert refused(dataclasses.replace(order, lanes=(lane[:-1],))) == "W0 of stage 0 is missing | by hand: rank 0"
    early = (F(0), F(1), W(1), B(1), B(0), W(0))
    assert refused(dataclasses.replace(order, lanes=(early,))).startswith(
        "deadlock: W0 of stage 1 waits for B0 of stage 1"
    )


def test_str() -> None:
    assert str(one_f_one_b(4, 8)) == "1f1b: 4 stages on 4 ranks, 8 micro-batches, 64 actions"
    assert str(prove_pipeline(one_f_one_b(2, 8))).endswith("activations in flight by stage: 2, 1")


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InputError, match=r"unknown pipeline schedule '1f1'(.|\n)*Did you mean '1f1b'\?"):
        pipeline_order("1f1", 2, 2)
    with pytest.raises(InputError, match=r"a pipeline of 0 ranks\n.*ranks >= 1"):
        pipeline_order("1f1b", 0, 2)
    with pytest.raises(InputError, match=r"a pipeline of 0 micro-batches"):
        one_f_one_b(2, 0)
    with pytest.raises(InputError, match=r"a pipeline of 0 stages per rank"):
        pipeline_order("interleaved", 2, 2, 0)
    with pytest.raises(
        InputError,
        match=r"zero-bubble with 3 stages per rank\n.*virtual=1 or 2\n.*schedule=interleaved takes virtual=3",
    ):
        pipeline_order("zero-bubble", 2, 2, 3)
    for name in ("naive", "gpipe", "1f1b"):
        with pytest.raises(InputError, match=rf"{name} with 2 stages per rank\n.*takes virtual=1\n"):
            pipeline_order(name, 2, 2, 2)
    for skip in ((0, 1), (2, 0), (1, 4), (-1, 2)):
        with pytest.raises(InputError, match=r"a skip from stage .* of 4\n.*beyond the next one"):
            check_skips((skip,), 4)
    check_skips(((0, 2), (1, 3), (0, 3)), 4)
