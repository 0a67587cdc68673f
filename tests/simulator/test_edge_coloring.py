"""Turns: as few as the busiest rank has messages, and no rank twice in one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from drumline.simulator.edge_coloring import turns


def fewest(pairs: list[tuple[int, int]]) -> int:
    """The most messages of one rank in one direction: a lower bound for turns."""
    ends = Counter(("out", src) for src, _ in pairs) + Counter(("in", dst) for _, dst in pairs)
    return max(ends.values(), default=0)


def check(pairs: list[tuple[int, int]]) -> None:
    turn_of = turns(pairs)
    assert set(turn_of) == set(pairs)
    assert len(set(turn_of.values())) == fewest(pairs)
    for end in (0, 1):
        assert len({(pair[end], turn) for pair, turn in turn_of.items()}) == len(pairs)


def test_a_star_keeps_the_given_order() -> None:
    assert turns([(3, 0), (1, 0), (2, 0)]) == {(3, 0): 0, (1, 0): 1, (2, 0): 2}
    assert turns([]) == {}


@pytest.mark.parametrize("p", range(2, 20))
def test_all_to_all_takes_one_turn_less_than_ranks(p: int) -> None:
    check([(a, b) for a in range(p) for b in range(p) if a != b])
    check([(a, b) for b in reversed(range(p)) for a in range(p) if a != b])


def test_any_round_takes_the_fewest_turns() -> None:
    chance = random.Random(3)
    for _ in range(300):
        p = chance.randint(2, 12)
        pairs = [(a, b) for a in range(p) for b in range(p) if a != b and chance.random() < chance.random()]
        chance.shuffle(pairs)
        check(pairs)
