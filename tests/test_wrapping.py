"""Text folded to a width: no word, number with its unit or `key=value` is cut that fits into a line."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from drumline.core.wrapping import for_reader, widest_part, wrap
from drumline.reports.console import FoldingConsole, borderless_table

PLAN = "dp=64,shard=32,zero=3,recompute=selective,schedule=zero-bubble,precision=bf16"
KEYS = [f"{key}," for key in PLAN.split(",")[:-1]] + [PLAN.split(",")[-1]]


def whole_keys(lines: list[str]) -> bool:
    """Check that the lines contain every `key=value` of the plan in one piece."""
    joined = "\n".join(lines)
    return all(key.rstrip(",") in joined for key in KEYS)


@pytest.mark.parametrize("width", [21, 30, 40, 79, 80, 120])
def test_a_plan_breaks_after_commas(width: int) -> None:
    lines = wrap(f"  data: {PLAN} 2.30 s, 113 GiB: exceeds device memory", width, indent=0)
    assert max(map(len, lines)) <= width
    assert whole_keys(lines)
    assert "113 GiB" in "\n".join(lines)


def test_a_plan_that_fits_into_a_line_is_not_cut() -> None:
    lines = wrap(f"The best alternative is {PLAN}: 11% slower", len(PLAN) + 2)
    assert lines[1].startswith(PLAN)


@given(st.text(alphabet="ab=,1 s", max_size=80), st.integers(8, 40), st.integers(0, 4))
def test_nothing_is_lost_and_no_line_is_too_wide(text: str, width: int, indent: int) -> None:
    lines = wrap(text, width, indent=indent)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(len(line) <= width for line in lines)


def test_the_widest_part() -> None:
    assert widest_part(f"step {PLAN}") == len("schedule=zero-bubble,")
    assert widest_part("") == 0


@pytest.mark.parametrize("width", [40, 80])
def test_the_console_folds_sentences_and_tables(width: int) -> None:
    out = FoldingConsole(file=io.StringIO(), width=width, force_terminal=False)
    table = borderless_table()
    table.add_column("plan", overflow="fold", min_width=widest_part(PLAN))
    table.add_column("why", overflow="fold")
    table.add_row(Text(PLAN), Text("a reason that is long enough to need several lines in a narrow column"))
    out.print(f"The best alternative is {PLAN}: 11% slower")
    out.print(table)
    out.print(Text(f"  data: {PLAN} 2.30 s"))
    text = out.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    assert all(text.count(key.rstrip(",")) == 3 for key in KEYS)
    assert max(map(len, text.splitlines())) <= width


def test_errors_are_folded_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    error = f"drumline: {PLAN} is refused\n  rule:  one of these is too large for the machine: {PLAN}"
    assert for_reader(error, io.StringIO()) == error and for_reader(error, None) == error
    lines = for_reader(error, Terminal()).splitlines()
    assert max(map(len, lines)) <= 40 and whole_keys(lines)
    assert lines[-1].startswith(" " * 9)
