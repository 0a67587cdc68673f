"""The table of classic all-reduces: textbook orders of growth, with exact counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import pytest

from drumline.core.errors import InputError, VerificationError
from drumline.schedules import Schedule, collective_schedule, prove
from drumline.schedules.exchange import exchange_by_pairs, exchange_in_turns, partitioned_exchange
from drumline.theory.scaling import GrowthRow, counts, growth_table, markdown


def rows_by_name(p: int) -> dict[str, GrowthRow]:
    return {row.algorithm: row for row in growth_table(p)}


def test_the_table() -> None:
    orders = {name: row.orders for name, row in rows_by_name(8).items()}
    assert orders == {
        "server": ("O(1)", "O(N P)", "O(N P)", "O(P)"),
        "naive": ("O(P)", "O(N)", "O(N)", "O(1)"),
        "exchange_by_pairs": ("O(P^2)", "O(N)", "O(N P)", "O(1)"),
        "exchange_in_turns": ("O(P)", "O(N)", "O(N P)", "O(1)"),
        "partitioned_exchange": ("O(P)", "O(N/P)", "O(N)", "O(1)"),
        "direct": ("O(1)", "O(N)", "O(N)", "O(P)"),
        "ring": ("O(P)", "O(N/P)", "O(N)", "O(1)"),
    }


@pytest.mark.parametrize("p", [2, 3, 8, 100])
def test_exact_counts(p: int) -> None:
    rows = {name: row.counts.numbers() for name, row in rows_by_name(p).items()}
    assert rows["server"] == (2, p - 1, p - 1, p - 1)
    assert rows["naive"][:2] == (2 * (p - 1), 1)
    assert rows["exchange_by_pairs"] == (p * (p - 1), 1, p - 1, 1)
    assert rows["exchange_in_turns"] == (p - 1, 1, p - 1, 1)
    share, whole = Fraction(1, p), Fraction(2 * (p - 1), p)
    assert rows["partitioned_exchange"] == (2 * (p - 1), share, whole, 1)
    assert rows["direct"] == (2, 1 - share, whole, p - 1)
    assert rows["ring"] == (2 * (p - 1), share, whole, 1)


@pytest.mark.parametrize("p", [3, 7, 50, 200])
def test_the_formulas_are_exact(p: int) -> None:
    for row in growth_table(p):
        if row.algorithm != "naive" or p > 2:  # of two ranks none is in the middle
            assert tuple(one.at(p) for one in row.growth) == row.counts.numbers()


def test_large_worlds_are_evaluated() -> None:
    ring = rows_by_name(16384)["ring"].counts
    assert ring.numbers() == (32766, Fraction(1, 16384), 2 - Fraction(2, 16384), 1)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("write", [exchange_by_pairs, exchange_in_turns, partitioned_exchange])
def test_the_exchanges_keep_their_contracts(write: Callable[[int], Schedule], p: int) -> None:
    prove(write(p))


def test_a_wrong_exchange_is_found() -> None:
    forwarded = dataclasses.replace(partitioned_exchange(3), rounds=tuple(partitioned_exchange(3).rounds)[:-1])
    with pytest.raises(VerificationError):
        prove(forwarded)


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
