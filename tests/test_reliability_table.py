"""The reliability table names tests that exist, once per line."""

from __future__ import annotations

import collections

import pytest
import reliability_table
from reliability_table import ROWS, Outcome, defined, outcome

LINES = {"F": 16, "N": 6, "C": 10, "B": 8, "S": 8, "L": 6}


def test_every_line_is_there_once() -> None:
    assert [row[0] for row in ROWS] == [f"{group}{i}" for group, n in LINES.items() for i in range(1, n + 1)]


def test_all_named_tests_are_defined() -> None:
    assert [name for row in ROWS for name in row[2] if not defined(name)] == []


@pytest.mark.parametrize(
    "name", ["none.py", "test_files.py::test_none", "reliability_table.py", "test_files.py::VALUE"]
)
def test_other_names_are_not(name: str) -> None:
    assert not defined(name)


def test_outcomes() -> None:
    counts = {
        "good": collections.Counter(passed=2),
        "bad": collections.Counter(passed=2, failed=1),
        "none": collections.Counter[str](),
        "skipped": collections.Counter({"skipped: no GPU": 3}),
    }
    assert outcome([], counts) == Outcome("MISSING")
    assert outcome(["good", "skipped"], counts) == Outcome("passed", "2 tests")
    assert outcome(["good", "bad"], counts).status == "failed"
    assert outcome(["good", "none"], counts) == Outcome("failed", "not found: none")
    assert outcome(["skipped"], counts) == Outcome("not applicable", "no GPU")


def test_a_line_without_a_test_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setattr(reliability_table, "ROWS", [("X1", "something", [], "")])
    assert reliability_table.main([]) == 1
