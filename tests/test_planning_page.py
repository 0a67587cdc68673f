"""The tables of docs/planning.md that count published runs are as their script writes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS.parents[1] / "shared" / "data"
RUNS, SWEEP = DATA / "published_runs.csv", DATA / "published_runs_bulk.csv"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paste_planning", DOCS / "paste_planning.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (RUNS.exists() and SWEEP.exists()), reason="the published runs are not next to this checkout")
def test_the_tables_of_published_runs() -> None:
    paste = script()
    tables = {"pairs": paste.pairs_table(str(RUNS)), "reserve": paste.memory_table(str(SWEEP))}
    page = (DOCS / "planning.md").read_text()
    assert paste.pasted(page, tables) == page, "run: python docs/paste_planning.py RUNS.csv SWEEP.csv"
    assert all(paste.pasted(page, {name: "another table"}) != page for name in tables)
