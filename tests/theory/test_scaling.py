"""The table of classic all-reduces: textbook orders of growth, with exact counts."""

from __future__ import annotations

from fractions import Fraction

import pytest

from drumline.core.errors import InputError
from drumline.schedules import collective_schedule
from drumline.theory.scaling import counts, growth_table, markdown


def test_the_table() -> None:
    server, line, ring = growth_table(8)
    assert server.orders == ("O(1)", "O(N P)", "O(N P)", "O(P)")
    assert line.orders == ("O(P)", "O(N)", "O(N)", "O(1)")
    assert ring.orders == ("O(P)", "O(N/P)", "O(N)", "O(1)")
    assert (server.counts.rounds, line.counts.rounds, ring.counts.rounds) == (2, 14, 14)
    assert (server.counts.fan_in, line.counts.fan_in, ring.counts.fan_in) == (7, 1, 1)


@pytest.mark.parametrize("p", [2, 3, 8, 100])
def test_exact_counts(p: int) -> None:
    server, line, ring = (row.counts for row in growth_table(p))
    assert server.numbers() == (2, p - 1, p - 1, p - 1)
    assert line.numbers()[:2] == (2 * (p - 1), 1)
    assert ring.numbers() == (2 * (p - 1), Fraction(1, p), Fraction(2 * (p - 1), p), 1)


@pytest.mark.parametrize("p", [3, 7, 50, 300])
def test_the_formulas_are_exact(p: int) -> None:
    for row in growth_table(p):
        if row.algorithm != "naive" or p > 2:  # of two ranks none is in the middle
            assert tuple(one.at(p) for one in row.growth) == row.counts.numbers()


def test_as_text() -> None:
    text = markdown(growth_table(8))
    assert (
        "| parameter server | O(1): 2 | O(N P): (P - 1) N = 7 N | O(N P): (P - 1) N = 7 N | O(P): P - 1 = 7 |" in text
    )
    assert "| ring | O(P): 2P - 2 = 14 | O(N/P): N/P = 1/8 N | O(N): (2 - 2/P) N = 7/4 N | O(1): 1 |" in text


def test_one_rank_sends_nothing() -> None:
    assert counts(collective_schedule("all_reduce", "ring", 1)).numbers() == (0, 0, 0, 0)
    with pytest.raises(InputError, match="a table for 1 ranks"):
        growth_table(1)
