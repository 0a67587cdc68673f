"""Splits of a dim, and how views carry them: checked against the numbers that each rank holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.partition.layout import Split, even, evenly, first_of, last_of, merged, reshaped
from drumline.partition.moves import part_of


def test_even_bounds_differ_by_one() -> None:
    assert even(10, 4) == (0, 3, 6, 8, 10)
    assert even(2, 3) == (0, 1, 2, 2)
    assert evenly(1, 12, 2, segments=3) == Split(1, ((0, 2, 4),) * 3)


def test_segments_lie_one_behind_the_other() -> None:
    split = Split(0, ((0, 2, 4), (0, 1, 3)))
    assert split.size == 7 and [split.length(r) for r in (0, 1)] == [3, 4]
    assert [list(x) for x in split.ranges(1)] == [[2, 3], [5, 6]]
    assert part_of(torch.arange(7), split, 0).tolist() == [0, 1, 4]
    assert str(split) == "dim 0 cut at ((0, 2, 4), (0, 1, 3)) in 2 segments"
    assert str(evenly(1, 4, 2)) == "dim 1 cut at (0, 2, 4)"


def test_segments_that_lie_together_become_one() -> None:
    assert merged((first_of(1, 2), (0, 4, 8))) == ((0, 5, 9),)
    assert merged(((0, 4, 8), last_of(1, 2))) == ((0, 4, 9),)
    assert merged(((0, 2, 4), (0, 2, 4))) == ((0, 2, 4), (0, 2, 4))
    assert merged(((0, 2, 2, 2), (0, 0, 3, 3), (0, 0, 0, 1))) == ((0, 2, 5, 6),)


@st.composite
def _views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Split]:
    """A shape, another one of as many numbers, and a split of the first."""
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
    found = reshaped(split, before, after)
    if found is None:
        return
    x = torch.arange(math.prod(before))
    for r in range(len(split.cuts[0]) - 1):
        local = list(after)
        local[found.dim] = found.length(r)
        mine = part_of(x.view(before), split, r).reshape(local)
        assert torch.equal(mine, part_of(x.view(after), found, r))


@pytest.mark.parametrize(
    ("before", "after", "split", "found"),
    [
        ((2, 3, 8), (2, 3, 4, 2), evenly(2, 8, 2), evenly(2, 4, 2)),
        ((2, 3, 24), (2, 3, 3, 4, 2), evenly(2, 24, 2, 3), Split(3, ((0, 2, 4),))),
        ((2, 4, 3), (8, 3), evenly(1, 4, 2), Split(0, ((0, 2, 4),) * 2)),
        ((8, 3), (2, 4, 3), Split(0, ((0, 2, 4),) * 2), evenly(1, 4, 2)),
        ((2, 3, 6), (2, 3, 3, 2), evenly(2, 6, 2), None),
        ((4, 1), (4,), evenly(0, 4, 2), evenly(0, 4, 2)),
        ((1, 4), (1, 1, 4), evenly(1, 4, 2), evenly(2, 4, 2)),
    ],
)
def test_views_that_models_use(
    before: tuple[int, ...], after: tuple[int, ...], split: Split, found: Split | None
) -> None:
    assert reshaped(split, before, after) == found
