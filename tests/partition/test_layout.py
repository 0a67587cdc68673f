"""Splits of a dim, and their propagation through views: checked against the values of each rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.partition.sharding.layout import (
    Split,
    all_on_first,
    all_on_last,
    even_bounds,
    even_split,
    merge_segments,
    reshape_split,
)
from drumline.partition.sharding.redistribution import part_of


def test_even_bounds_differ_by_one() -> None:
    assert even_bounds(10, 4) == (0, 3, 6, 8, 10)
    assert even_bounds(2, 3) == (0, 1, 2, 2)
    assert even_split(1, 12, 2, segments=3) == Split(1, ((0, 2, 4),) * 3)


def test_segments_are_concatenated() -> None:
    split = Split(0, ((0, 2, 4), (0, 1, 3)))
    assert split.size == 7 and [split.length(r) for r in (0, 1)] == [3, 4]
    assert [list(x) for x in split.ranges(1)] == [[2, 3], [5, 6]]
    assert part_of(torch.arange(7), split, 0).tolist() == [0, 1, 4]
    assert str(split) == "dim 0 cut at ((0, 2, 4), (0, 1, 3)) in 2 segments"
    assert str(even_split(1, 4, 2)) == "dim 1 cut at (0, 2, 4)"


def test_adjacent_segments_are_merged() -> None:
    assert merge_segments((all_on_first(1, 2), (0, 4, 8))) == ((0, 5, 9),)
    assert merge_segments(((0, 4, 8), all_on_last(1, 2))) == ((0, 4, 9),)
    assert merge_segments(((0, 2, 4), (0, 2, 4))) == ((0, 2, 4), (0, 2, 4))
    assert merge_segments(((0, 2, 2, 2), (0, 0, 3, 3), (0, 0, 0, 1))) == ((0, 2, 5, 6),)


@st.composite
def _views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Split]:
    """A shape, another one with as many elements, and a split of the first."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=5))
    before, after = (_shape(draw, primes) for _ in range(2))
    dim = draw(st.integers(0, len(before) - 1))
    size = before[dim]
    segments = draw(st.sampled_from([k for k in (1, 2, 3) if size % k == 0]))
    inner = sorted(draw(st.lists(st.integers(0, size // segments), min_size=1, max_size=2)))
    return before, after, Split(dim, ((0, *inner, size // segments),) * segments)


def _shape(draw: st.DrawFn, primes: list[int]) -> tuple[int, ...]:
    left = draw(st.permutations(primes))
    shape, i = [], 0
    while i < len(left):
        step = draw(st.integers(1, 2))
        shape.append(math.prod(left[i : i + step]))
        i += step
        if draw(st.booleans()):
            shape.append(1)
    return tuple(shape)


@settings(max_examples=300, deadline=None)
@given(_views())
def test_a_view_of_a_part_is_the_part_of_the_view(view: tuple[tuple[int, ...], tuple[int, ...], Split]) -> None:
    before, after, split = view
    result = reshape_split(split, before, after)
    if result is None:
        return
    x = torch.arange(math.prod(before))
    for r in range(len(split.cuts[0]) - 1):
        local = list(after)
        local[result.dim] = result.length(r)
        mine = part_of(x.view(before), split, r).reshape(local)
        assert torch.equal(mine, part_of(x.view(after), result, r))


@pytest.mark.parametrize(
    ("before", "after", "split", "expected"),
    [
        ((2, 3, 8), (2, 3, 4, 2), even_split(2, 8, 2), even_split(2, 4, 2)),
        ((2, 3, 24), (2, 3, 3, 4, 2), even_split(2, 24, 2, 3), Split(3, ((0, 2, 4),))),
        ((2, 4, 3), (8, 3), even_split(1, 4, 2), Split(0, ((0, 2, 4),) * 2)),
        ((8, 3), (2, 4, 3), Split(0, ((0, 2, 4),) * 2), even_split(1, 4, 2)),
        ((2, 3, 6), (2, 3, 3, 2), even_split(2, 6, 2), None),
        ((4, 1), (4,), even_split(0, 4, 2), even_split(0, 4, 2)),
        ((1, 4), (1, 1, 4), even_split(1, 4, 2), even_split(2, 4, 2)),
    ],
)
def test_views_that_models_use(
    before: tuple[int, ...], after: tuple[int, ...], split: Split, expected: Split | None
) -> None:
    assert reshape_split(split, before, after) == expected
