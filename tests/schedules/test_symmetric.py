"""The short form of symmetric schedules: the same messages as the schedules themselves."""

from __future__ import annotations

from fractions import Fraction

import pytest

from drumline.schedules import ALGORITHMS, collective_schedule, messages
from drumline.schedules.symmetric import SymmetricRounds, symmetric_rounds

NAMES = [(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms]


def written_out(rounds: tuple[SymmetricRounds, ...], p: int) -> list[dict[tuple[int, int], Fraction]]:
    """Share of the buffer by (src, dst), round by round."""
    return [{(r, one.partner(r)): one.share for r in range(p)} for one in rounds for _ in range(one.times)]


def counted(collective: str, algorithm: str, p: int, per_node: int) -> list[dict[tuple[int, int], Fraction]]:
    """The same from the schedule."""
    schedule = collective_schedule(collective, algorithm, p, per_node=per_node)
    whole = schedule.chunks  # bytes, of which every chunk has equally many
    sizes = schedule.sizes(whole)
    return [
        {pair: Fraction(sum(sizes[s.chunk] for s in parts), whole) for pair, parts in messages(sends).items()}
        for sends in schedule.rounds
    ]


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 12, 16])
def test_the_same_messages(collective: str, algorithm: str, p: int) -> None:
    for per_node in range(1, p + 1):
        rounds = symmetric_rounds(collective, algorithm, p, per_node)
        if rounds is not None:
            assert written_out(rounds, p) == counted(collective, algorithm, p, per_node)
        if algorithm != "hierarchical":
            break


def test_which_schedules_are_symmetric() -> None:
    symmetric = {name for name in NAMES if symmetric_rounds(*name, 8, 4)}
    assert symmetric == {
        ("all_reduce", "ring"),
        ("all_reduce", "halving"),
        ("all_reduce", "doubling"),
        ("all_reduce", "hierarchical"),
        ("all_gather", "ring"),
        ("all_gather", "doubling"),
        ("all_gather", "bruck"),
        ("all_gather", "hierarchical"),
        ("reduce_scatter", "ring"),
        ("reduce_scatter", "halving"),
        ("reduce_scatter", "hierarchical"),
        ("all_to_all", "pairwise"),
        ("all_to_all", "bruck"),
        ("barrier", "dissemination"),
    }


def test_ranks_that_differ_have_no_short_form() -> None:
    assert symmetric_rounds("all_reduce", "hierarchical", 10, 4) is None  # the last host is smaller
    assert symmetric_rounds("all_reduce", "halving", 6) is None  # pairs fold into one rank
    assert symmetric_rounds("broadcast", "binomial", 8) is None
    assert symmetric_rounds("all_reduce", "ring", 1) is None


def test_groups_that_can_change_places() -> None:
    ring, inside = SymmetricRounds(7, Fraction(1, 8), 1, 8), SymmetricRounds(3, Fraction(1, 4), 1, 4)
    assert ring.keeps(2, 8) and ring.keeps(4, 8)
    assert inside.keeps(4, 8) and not inside.keeps(2, 8)
    assert SymmetricRounds(1, Fraction(1), 2, 8, xor=True).keeps(4, 8)
    assert not SymmetricRounds(1, Fraction(1), 2, 12, xor=True).keeps(3, 12)
