"""Pipelines that do not drain: every batch is applied once, on one version of the weights, as stale as the formula says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.errors import InputError, VerificationError
from drumline.schedules import (
    ASYNCHRONOUS,
    Action,
    Pipeline,
    batches_in_flight,
    expected_staleness,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    pipeline_order,
    prove_pipeline,
    update_delay,
)
from drumline.schedules.pipeline import AsynchronousLane

STAGES = st.integers(1, 8)
calm = settings(deadline=None, max_examples=60)  # other work on the machine is no failure


def lanes(pipeline: Pipeline) -> list[str]:
    return [" ".join(map(str, lane)) for lane in pipeline.lanes]


@calm
@given(p=STAGES, batches=st.integers(1, 24))
def test_pipedream_has_the_versions_and_the_staleness_of_the_formula(p: int, batches: int) -> None:
    proof = prove_pipeline(pipedream(p, batches))
    assert proof.updates is not None
    assert proof.in_flight == tuple(min(p - s, batches) for s in range(p))
    assert all(n <= p - s for s, n in enumerate(proof.updates.versions))
    if batches >= 2 * p:
        assert proof.updates.versions == tuple(p - s for s in range(p))
    for s, stale in enumerate(proof.updates.staleness):
        assert list(stale) == [min(t, p - 1 - s) for t in range(batches)]
        assert stale == tuple(expected_staleness("pipedream", p, t)[s] for t in range(batches))


@calm
@given(p=STAGES, more=st.integers(0, 6), batches=st.integers(1, 6))
def test_2bw_has_two_versions_and_a_staleness_of_one(p: int, more: int, batches: int) -> None:
    proof = prove_pipeline(batches_in_flight("pipedream-2bw", p, [p + more] * batches))
    assert proof.updates is not None
    assert max(proof.in_flight) <= p
    assert max(proof.updates.versions) <= (2 if p > 1 else 1)
    for stale in proof.updates.staleness:
        assert list(stale) == [min(t, 1, p - 1) for t in range(batches)]


@calm
@given(p=STAGES, batches=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_batches_of_any_size(p: int, batches: list[int]) -> None:
    """The last batch of an epoch may have fewer micro-batches than there are stages."""
    order = batches_in_flight("pipedream-2bw", p, batches)
    proof = prove_pipeline(order)
    assert proof.updates is not None
    assert all(len(stale) == len(batches) for stale in proof.updates.staleness)
    assert max(proof.updates.versions) <= 2
    assert proof.updates.staleness == tuple(
        tuple(expected_staleness("pipedream-2bw", p, t)[s] for t in range(len(batches))) for s in range(p)
    )


@calm
@given(p=STAGES, batches=st.lists(st.integers(1, 9), min_size=1, max_size=5), name=st.sampled_from(ASYNCHRONOUS))
def test_forwards_and_backwards_are_those_of_1f1b(p: int, batches: list[int], name: str) -> None:
    """Without its updates, and where no batch is shorter than the pipeline, it is 1F1B over all batches at once."""
    sizes = [1] * len(batches) if name == "pipedream" else [max(n, p) for n in batches]
    order = batches_in_flight(name, p, sizes)
    passes = tuple(tuple(a for a in lane if a.kind != "U") for lane in order.lanes)
    assert passes == one_f_one_b(p, sum(sizes)).lanes


def test_pipedream_as_in_the_paper() -> None:
    assert lanes(pipedream(3, 4)) == [
        "F0 F1 F2 B0 U0 F3 B1 U1 B2 U2 B3 U3",
        "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3",
    ]


def test_2bw_updates_after_the_last_forward_of_the_next_batch() -> None:
    assert lanes(pipedream_2bw(2, 6)) == [
        "F0 F1 B0 F2 B1 F3 B2 U1 F4 B3 F5 B4 U3 B5 U5",
        "F0 B0 F1 B1 F2 B2 F3 B3 U1 F4 B4 F5 B5 U3 U5",
    ]


def test_one_stage_has_no_delay() -> None:
    for name in ASYNCHRONOUS:
        assert update_delay(name, 1, 0) == 0
        assert expected_staleness(name, 1, 7) == (0,)
    assert lanes(pipedream_2bw(1, 2)) == ["F0 B0 U0 F1 B1 U1"]
    assert lanes(batches_in_flight("pipedream-2bw", 1, [2, 2])) == ["F0 B0 F1 B1 U1 F2 B2 F3 B3 U3"]


def test_a_lane_is_the_same_batch_by_batch() -> None:
    lane = AsynchronousLane("pipedream", 3, 0)
    assert [" ".join(map(str, lane.feed(1))) for _ in range(4)] == ["F0", "F1", "F2 B0 U0", "F3 B1 U1"]
    assert " ".join(map(str, lane.drain())) == "B2 U2 B3 U3"
    assert " ".join(map(str, lane.feed(1))) == "F0"  # it begins anew
    with pytest.raises(InputError, match=r"a pipeline of 0 micro-batches"):
        lane.feed(0)


def test_several_stages_per_rank_are_refused() -> None:
    with pytest.raises(InputError, match=r"pipedream with 2 stages per rank\n.*takes virtual=1"):
        pipeline_order("pipedream", 4, 8, 2)


# -- broken schedules are detected


def mutate(pipeline: Pipeline, change: Callable[[list[list[Action]]], object]) -> Pipeline:
    changed = [list(lane) for lane in pipeline.lanes]
    change(changed)
    return dataclasses.replace(pipeline, lanes=tuple(map(tuple, changed)))


def refused(pipeline: Pipeline) -> str:
    with pytest.raises(VerificationError) as caught:
        prove_pipeline(pipeline)
    return caught.value.what


def test_an_update_that_is_missing_or_out_of_order() -> None:
    good = pipedream(3, 4)
    assert refused(mutate(good, lambda lanes: lanes[1].remove(Action("U", 1, 2)))) == "updates [0, 1, 3] of stage 1"

    def without_last(lanes: list[list[Action]]) -> None:
        for s, lane in enumerate(lanes):
            lane.remove(Action("U", s, 3))

    assert refused(mutate(good, without_last)) == "updates up to [2]"

    def swapped(lanes: list[list[Action]]) -> None:
        i, j = lanes[0].index(Action("U", 0, 2)), lanes[0].index(Action("U", 0, 3))
        lanes[0][i], lanes[0][j] = lanes[0][j], lanes[0][i]

    assert refused(mutate(good, swapped)).startswith("deadlock: U3 of stage 0 waits for B3")


def test_an_update_before_its_gradient() -> None:
    def early(lanes: list[list[Action]]) -> None:
        lanes[0].remove(Action("U", 0, 0))
        lanes[0].insert(0, Action("U", 0, 0))

    assert refused(mutate(pipedream(2, 3), early)) == "deadlock: U0 of stage 0 waits for B0 of stage 0"


def test_a_batch_on_two_versions_of_the_weights() -> None:
    """2BW that updates at once, like PipeDream: forwards of the next batch are on both sides of the update."""

    def at_once(lanes: list[list[Action]]) -> None:
        lanes[0].remove(Action("U", 0, 1))
        lanes[0].insert(lanes[0].index(Action("B", 0, 1)) + 1, Action("U", 0, 1))

    assert refused(mutate(pipedream_2bw(2, 6), at_once)) == "U3 of stage 0 mixes weights"


def test_a_joint_update_before_the_first_stage_has_its_gradients() -> None:
    """The last stage waits for a norm, and the first one, before that gradient, for the last stage's next backward."""

    def early(lanes: list[list[Action]]) -> None:
        lanes[1].remove(Action("U", 1, 1))
        lanes[1].insert(lanes[1].index(Action("F", 1, 2)), Action("U", 1, 1))
        lanes[0].remove(Action("B", 0, 1))
        lanes[0].insert(lanes[0].index(Action("B", 0, 2)) + 1, Action("B", 0, 1))

    assert refused(mutate(pipedream_2bw(2, 6), early)).startswith("deadlock")
