"""Turns: as few as the busiest rank has messages, and no rank twice in one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from drumline.simulator.edge_coloring import turns


def fewest(pairs: list[tuple[int, int]]) -> int:
    """The most messages of one rank in one direction: fewer turns cannot do."""
    ends = Counter(("out", src) for src, _ in pairs) + Counter(("in", dst) for _, dst in pairs)
    return max(ends.values(), default=0)


def check(pairs: list[tuple[int, int]]) -> None:
    found = turns(pairs)
    assert set(found) == set(pairs)
    assert len(set(found.values())) == fewest(pairs)
    for end in (0, 1):
        assert len({(pair[end], turn) for pair, turn in found.items()}) == len(pairs)


def test_a_star_goes_in_the_order_in_which_it_stands() -> None:
    assert turns([(3, 0), (1, 0), (2, 0)]) == {(3, 0): 0, (1, 0): 1, (2, 0): 2}
    assert turns([]) == {}


@pytest.mark.parametrize("p", range(2, 20))
def test_everybody_to_everybody_takes_one_turn_less_than_ranks(p: int) -> None:
    check([(a, b) for a in range(p) for b in range(p) if a != b])
    check([(a, b) for b in reversed(range(p)) for a in range(p) if a != b])


def test_any_round_does_with_the_fewest() -> None:
    chance = random.Random(3)
    for _ in range(300):
        p = chance.randint(2, 12)
        pairs = [(a, b) for a in range(p) for b in range(p) if a != b and chance.random() < chance.random()]
        chance.shuffle(pairs)
        check(pairs)
