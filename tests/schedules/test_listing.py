"""The list of algorithms matches the schedules, and the document matches the list."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from drumline.schedules import ALGORITHMS, AlgorithmRow, listing
from drumline.schedules.listing import HEADS, markdown, pasted

DOCUMENT = Path(__file__).parents[2] / "docs" / "collectives.md"


def row(collective: str, algorithm: str, p: int) -> AlgorithmRow:
    return next(r for r in listing(p) if (r.collective, r.algorithm) == (collective, algorithm))


@pytest.mark.parametrize("p", [1, 2, 7, 8])
def test_every_algorithm_is_listed(p: int) -> None:
    assert [(r.collective, r.algorithm) for r in listing(p)] == [
        (c, a) for c, known in ALGORITHMS.items() for a in known
    ]
    assert all(len(r.cells()) == len(HEADS) for r in listing(p))


def test_rows_by_hand() -> None:
    assert row("all_reduce", "ring", 8) == AlgorithmRow("all_reduce", "ring", 8, 14, Fraction(7, 4), 14, 1)
    assert row("all_reduce", "direct", 8) == AlgorithmRow("all_reduce", "direct", 8, 2, Fraction(7, 4), 14, 7)
    assert row("all_reduce", "doubling", 7) == AlgorithmRow("all_reduce", "doubling", 7, 4, Fraction(3), 3, 1)
    assert row("reduce", "flat", 7) == AlgorithmRow("reduce", "flat", 7, 1, Fraction(1), 1, 6)
    assert row("all_to_all", "bruck", 8).bytes == Fraction(3, 2)
    assert row("barrier", "central", 8).cells() == ("barrier", "central", "2", "0", "7", "7")
    assert row("broadcast", "chain", 8).cells()[3] == "m"


def test_hosts_are_taken_into_account() -> None:
    inside = next(r for r in listing(8, per_node=4) if r.algorithm == "hierarchical")
    assert (inside.rounds, inside.bytes) == (2 * 3 + 2 * 1, Fraction(7, 4))


def test_the_document_contains_the_list() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for p in (8, 7):
        assert f"<!-- listing {p} -->\n{markdown(listing(p))}\n<!-- end -->" in text
    assert pasted(text) == text, "run: python docs/paste_listing.py"
    assert pasted(text.replace("| all_reduce | ring | 14 |", "| all_reduce | ring | 15 |")) == text


def test_the_document_names_every_algorithm() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    prose = text[text.index("## all_reduce") :]
    for collective, known in ALGORITHMS.items():
        assert collective in prose
        for algorithm in known:
            assert f"`{algorithm}`" in prose
