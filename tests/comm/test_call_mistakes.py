"""Different calls are refused on every rank within a second, both lines named, on every backend of ours (N1)."""

from __future__ import annotations

import re

import call_mistakes
import pytest
from world import World

WARM = 40
"""Rounds after which gloo compares calls only where they deviate."""


def check(ranks: World, kind: str, backend: str, rounds: int) -> None:
    answers = ranks.run(call_mistakes.make, kind, backend, rounds, timeout=30)
    for seconds, name, text in answers:
        assert name == "GroupInputError", text
        assert seconds < 1.0
        assert "ranks made different calls" in text or "in a different order" in text
        assert f"rank {ranks.size - 1}: " in text and re.search("ranks? 0", text) and "call_mistakes.py:" in text


@pytest.mark.alone  # an error must appear within a second
@pytest.mark.parametrize("rounds", [0, WARM])
@pytest.mark.parametrize("backend", ["shm", "checked_gloo"])
@pytest.mark.parametrize("kind", list(call_mistakes.MISTAKES))
def test_n1_a_mistake_is_refused_on_all_ranks(world, kind: str, backend: str, rounds: int) -> None:
    check(world(2), kind, backend, rounds)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("rounds", [0, WARM])
@pytest.mark.parametrize("backend", ["shm", "checked_gloo"])
@pytest.mark.parametrize("kind", list(call_mistakes.MISTAKES))
def test_n1_with_three_ranks(world, kind: str, backend: str, rounds: int) -> None:
    check(world(3), kind, backend, rounds)
