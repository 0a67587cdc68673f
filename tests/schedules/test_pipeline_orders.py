"""Every pipeline schedule is proved for many sizes, and keeps the activations of theory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.costs.pipeline_clock import time_pipeline
from drumline.plans.plan import CHOICES
from drumline.schedules import ASYNCHRONOUS, ORDERS, Pipeline, pipeline_order, prove_pipeline, zero_bubble_h2

RANKS, MICROS = st.integers(1, 8), st.integers(1, 32)
calm = settings(deadline=None, max_examples=60)  # other work on the machine is no failure
MADE = [(name, virtual) for name, order in ORDERS.items() for virtual in order.virtual or (1, 2, 3, 4)]


def lanes(pipeline: Pipeline) -> list[str]:
    return [" ".join(map(pipeline.label, lane)) for lane in pipeline.lanes]


def ways(p: int) -> Iterator[tuple[int, int]]:
    """(stage, rank) of the V."""
    for rank in range(p):
        yield from ((rank, rank), (2 * p - 1 - rank, rank))


def test_the_table_has_the_names_of_the_plan() -> None:
    assert tuple(ORDERS) == CHOICES["schedule"]


@pytest.mark.parametrize(("name", "virtual"), MADE)
@calm
@given(p=RANKS, m=MICROS)
def test_every_schedule_is_proved(name: str, virtual: int, p: int, m: int) -> None:
    order = pipeline_order(name, p, m, virtual)
    proof = prove_pipeline(order)
    assert (order.name, order.stages, order.micros, len(order.lanes)) == (name, p * virtual, m, p)
    assert order.splits_backward == (name == "zero-bubble")
    passes = [[a for a in lane if a.kind != "U"] for lane in order.lanes]
    assert all(len(lane) == (3 if order.splits_backward else 2) * virtual * m for lane in passes)
    assert order.has_updates == (proof.updates is not None) == (name in ASYNCHRONOUS)
    if name == "zero-bubble" and virtual == 2:
        assert order.homes() == dict(ways(p))
    else:
        assert order.homes() == {s: s % p for s in range(p * virtual)}
    bounded = dict.fromkeys(("1f1b", "zero-bubble", *ASYNCHRONOUS), virtual * p)
    assert max(proof.activations) <= {"naive": 1, **bounded}.get(name, virtual * m)


@calm
@given(p=RANKS, m=MICROS)
def test_activations_of_basic_schedules(p: int, m: int) -> None:
    activations = {name: prove_pipeline(pipeline_order(name, p, m)).activations for name in ORDERS}
    assert activations["naive"] == (1,) * p
    assert activations["gpipe"] == (m,) * p
    assert activations["1f1b"] == activations["interleaved"] == tuple(min(p - r, m) for r in range(p))
    assert activations["pipedream"] == activations["1f1b"]
    # Weights that wait take the places that the later stages of 1F1B leave empty.
    assert activations["zero-bubble"] == (min(p, m),) * p


@calm
@given(p=RANKS, m=MICROS, virtual=st.integers(2, 4))
def test_activations_of_interleaved(p: int, m: int, virtual: int) -> None:
    """The group of the last stage, one more action, and two for each later rank; never more than exist."""
    group = -(-m // max(1, m // p))
    expected = tuple(min((virtual - 1) * group + 2 * (p - 1 - r) + 1, virtual * m) for r in range(p))
    assert prove_pipeline(pipeline_order("interleaved", p, m, virtual)).activations == expected


@calm
@given(p=RANKS, m=MICROS)
def test_ranks_of_the_v_keep_equally_many_activations(p: int, m: int) -> None:
    activations = prove_pipeline(pipeline_order("zero-bubble", p, m, 2)).activations
    assert max(activations) <= 2 * p
    assert m < 2 * p or set(activations) == {2 * p}


def test_naive_gpipe_and_h1_as_in_the_papers() -> None:
    assert lanes(pipeline_order("naive", 2, 2)) == ["F0 B0 F1 B1"] * 2
    assert lanes(pipeline_order("gpipe", 2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert lanes(pipeline_order("zero-bubble", 3, 4)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_interleaved_as_in_the_paper() -> None:
    assert lanes(pipeline_order("interleaved", 2, 4, 2)) == [
        "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0",
        "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1",
    ]


def test_interleaved_groups_are_no_smaller_than_the_ranks() -> None:
    """Seven micro-batches on three ranks: groups of 3 and 4; groups of 3, 3 and 1 would leave a gap."""
    lane = [a for a in pipeline_order("interleaved", 3, 7, 2).lanes[2] if a.kind == "F"]
    assert [(a.stage, a.micro) for a in lane] == [
        *((2, i) for i in range(3)),
        *((5, i) for i in range(3)),
        *((2, i) for i in range(3, 7)),
        *((5, i) for i in range(3, 7)),
    ]


def test_the_v() -> None:
    assert lanes(pipeline_order("zero-bubble", 2, 2, 2)) == [
        "F0@0 F1@0 F0@3 B0@3 W0@3 F1@3 B0@0 B1@3 W1@3 W0@0 B1@0 W1@0",
        "F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 W0@2 W0@1 B1@2 B1@1 W1@2 W1@1",
    ]


def test_a_v_is_built_once() -> None:
    assert pipeline_order("zero-bubble", 4, 9, 2) is pipeline_order("zero-bubble", 4, 9, 2)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 3, 13, 20])
def test_ranks_of_h2_do_not_wait(p: int, m: int) -> None:
    """With equal times and enough micro-batches, between their first and last action; with 2p - 1 activations."""
    order = zero_bubble_h2(p, m)
    proof = prove_pipeline(order)
    assert max(proof.activations) <= 2 * p - 1
    times = time_pipeline(order, forward=1, backward=1, weight=1)
    if m >= 2 * p - 1:
        assert times.longest_rank_seconds == 3 * m
    assert times.seconds >= times.longest_rank_seconds
