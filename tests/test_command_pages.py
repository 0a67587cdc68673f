"""Pages of executed commands: every command prints exactly what the page shows, and the numbers are those published."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import command
import pytest

from drumline.core.errors import InputError
from drumline.theory.zero_memory import StateBytes, zero_states
from drumline.validation.case_studies import STUDIES, case_study
from drumline.validation.zero_table import ZERO_PUBLISHED, zero_rows

ROOT = Path(__file__).parents[1]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paste_commands", ROOT / "docs" / "paste_commands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(arguments: list[str]) -> str:
    done = command.here(*arguments, cwd=ROOT, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", script().PAGES)
def test_a_page_shows_what_its_commands_print(name: str) -> None:
    paste = script()
    text = (ROOT / "docs" / name).read_text()
    assert len(paste.BLOCK.findall(text)) >= 2
    assert paste.pasted(text, run) == text, "run: python docs/paste_commands.py"
    assert paste.pasted(text, lambda _: "something else") != text


def test_the_page_has_every_study() -> None:
    text = (ROOT / "docs" / "case-studies.md").read_text()
    assert set(re.findall(r"\$ drumline demo case-studies:(\S+)", text)) == set(STUDIES)


def test_zero_by_formula_equals_the_published_table() -> None:
    for stage, published in enumerate(ZERO_PUBLISHED):
        assert zero_states(7.5e9, 64, stage) / 1e9 == pytest.approx(published, abs=0.05)
    assert zero_states(1e9, 1, 3) == 16e9
    assert zero_states(1e9, 4, 2, StateBytes(4, 4, 8)) == 4e9 + 12e9 / 4
    for wrong in ((1e9, 4, 4), (1e9, 0, 1), (0, 4, 1)):
        with pytest.raises(InputError):
            zero_states(*wrong)


def test_our_side_of_the_table_is_what_the_text_says() -> None:
    rows = zero_rows()
    psi = rows[0].parameters
    assert psi == pytest.approx(7.5e9, rel=0.01)
    assert rows[0].states == pytest.approx(18 * psi, rel=0.01)  # fp32 weights and a bf16 copy, fp32 gradients, moments
    assert rows[0].states - rows[1].states == pytest.approx(8 * psi * 63 / 64, rel=0.01)
    assert rows[3].peak.parameters == pytest.approx(4 * psi / 64, rel=0.01)
    assert all(row.rest > 0 and row.total == pytest.approx(row.states + row.rest) for row in rows)


def test_the_studies_by_hand() -> None:
    one = case_study("one-device").numbers
    assert one["operations"] == 6 * 280e9 * 13e12
    assert one["years_at_peak"] == pytest.approx(2.184e25 / 312e12 / (365.25 * 86400))
    assert one["operations_of_the_run.low"] < one["operations"] < one["operations_of_the_run.high"]
    assert one["operations_with_all_parameters"] > 5 * one["operations_of_the_run.high"]
    assert case_study("layers").numbers["layer_bytes.4"] == 60e9
    traffic = case_study("tensor-pipeline").numbers
    assert traffic["pipeline"] == 2 * 2048 * 12288
    assert traffic["tensor"] == pytest.approx(traffic["counted"]) == pytest.approx(2 * 12 * 1.75 * traffic["m"])
    nvlink = case_study("nvlink").numbers
    assert nvlink["a800.link"] < nvlink["needed"] < nvlink["dgx-a100.link"]
    assert nvlink["a800.step"] > nvlink["dgx-a100.step"]


def test_the_command() -> None:
    done = command.here("demo", "case-studies", "--json")
    assert list(json.loads(done.stdout)["case_studies"]) == list(STUDIES)
    done = command.here("demo", "case-studies", COLUMNS="40")
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 40
    done = command.here("demo", "case-studies:zerp")
    assert done.returncode == 2 and "no case study 'zerp'" in done.stderr and "'zero'" in done.stderr
    done = command.here("demo", "studies")
    assert done.returncode == 2 and "demo studies" in done.stderr
    done = command.here("demo", "--json")
    assert done.returncode == 2 and "--json of the whole loop" in done.stderr
