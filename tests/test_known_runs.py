"""The table of well-known runs: every prediction is within 15%, or explained; the page shows what is predicted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from drumline.core.units import format_seconds
from drumline.validation import validate

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "known-runs.md"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


def test_every_error_is_small_or_explained_and_on_the_page() -> None:
    known = module(ROOT / "benchmarks" / "known_runs.py")
    result = validate(known.TABLE)
    assert not result.skipped and len(result.runs) == 8
    errors = {r.name: s / (r.seconds or np.nan) - 1 for r, s in zip(result.runs, result.seconds, strict=True)}
    far = {name for name, error in errors.items() if abs(error) > known.WITHIN}
    assert far <= set(known.EXPLAINED) and len(far) <= 2
    page = PAGE.read_text()
    for run, seconds in zip(result.runs, result.seconds, strict=True):
        row = next(line for line in page.splitlines() if line.startswith(f"| {run.name} |"))
        assert row.split("|")[4].strip() == format_seconds(float(seconds)), "run: python docs/paste_known_runs.py"


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints() -> None:
    known, paste = module(ROOT / "benchmarks" / "known_runs.py"), module(ROOT / "docs" / "paste_known_runs.py")
    table = known.markdown([*known.transformers(), *known.operators()])
    assert paste.pasted(PAGE.read_text(), table) == PAGE.read_text(), "run: python docs/paste_known_runs.py"
