"""The benchmark of a slow worker: its table and its picture, from made-up runs, and the command that it pastes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def stragglers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import stragglers

    return stragglers


def run(speed: float) -> Any:
    """A run whose loss falls from 2, by steps of a second over `speed`; its gradients are up to 3 updates old."""
    losses = [2 / (1 + speed * i) for i in range(40)]
    steps = [SimpleNamespace(elapsed=1.0 + i, seconds=1.0, samples=8, staleness=(i % 4,)) for i in range(40)]
    return SimpleNamespace(losses=losses, steps=steps, step_seconds=1.0, estimate=SimpleNamespace(step_seconds=1.1))


def test_the_table_and_the_picture_have_the_target(stragglers: Any) -> None:
    runs = {plan: run(i * 0.4) for i, plan in enumerate(stragglers.PLANS)}
    lines = stragglers.table({plan: [mine] for plan, mine in runs.items()})
    heads, cells = ([cell.strip() for cell in lines[i].split("|")] for i in (0, 3))
    assert cells[heads.index("staleness")] == "1.5" and cells[heads.index("most")] == "3"
    drawn = stragglers.picture(runs)
    assert drawn.count(">loss 0.25<") == 2 and drawn.count("<circle") == 2 * (len(runs) - 1), (
        "the first never gets there"
    )


def test_the_page_names_the_command_that_was_run(
    stragglers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n" + stragglers.MARKS[0] + "old\n" + stragglers.MARKS[1] + "after\n")
    monkeypatch.setattr(stragglers, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["stragglers.py", "--steps", "60", "--output", "a folder", "--paste"])
    stragglers.paste(["| a |"])
    assert "`python benchmarks/stragglers.py --steps 60 --output 'a folder' --paste`" in page.read_text()
    from server_or_ring import command_line

    assert command_line() == "python benchmarks/server_or_ring.py --steps 60 --output 'a folder' --paste"
