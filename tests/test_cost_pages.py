"""The pages on costs are executed: every program prints exactly what the page says, and tables are as code writes them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("cost.md", "case-studies.md", "network.md", "asynchronous.md")
PUBLISHED = DOCS.parents[1] / "shared" / "data" / "published_collectives.csv"


def programs() -> list[tuple[str, int, str]]:
    blocks_of_pages = []
    for name in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
        blocks_of_pages += [(name, i, text) for i, text in enumerate(blocks)]
    return blocks_of_pages


def run(text: str) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "page", "exec"), {"__name__": "page"})
    return out.getvalue().splitlines()


def promised(text: str) -> list[str]:
    """Extract the expected output: comments after a print, or on their own lines."""
    return re.findall(r"(?m)^(?:print\(.*\)  )?# (.*)$", text)


def program(name: str, words: str) -> str:
    (program,) = [text for page, _, text in programs() if page == name and words in text]
    return program


@pytest.mark.parametrize(("name", "number", "text"), programs(), ids=[f"{n} {i}" for n, i, _ in programs()])
def test_a_program_prints_what_the_page_says(name: str, number: int, text: str) -> None:
    assert promised(text), f"{name}: program {number} promises nothing"
    assert run(text) == promised(text)


def test_the_answers_follow_the_numbers() -> None:
    nvlink = program("case-studies.md", "between = 160e9")
    assert run(nvlink.replace("160e9", "80e9"))[1:] == [
        "dgx-a100: 300 GB/s of 140 suffices",
        "a800: 200 GB/s of 140 suffices",
    ]
    assert run(nvlink.replace("160e9", "200e9"))[1] == "dgx-a100: 300 GB/s of 350 does not suffice"
    server = program("case-studies.md", "workers = 97.5e6")
    assert "suffices" in run(server.replace("3, 256", "3, 100"))
    years = program("case-studies.md", "active, parameters")
    assert run(years.replace("0.5", "1.0"))[0].endswith("2,218 years")


def test_all_pages_have_their_programs() -> None:
    assert len(programs()) >= 12
    assert {name for name, _, _ in programs()} == set(PAGES)


def paste() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paste_cost", DOCS / "paste_cost.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_as_code_writes_them() -> None:
    text, pasted = (DOCS / "cost.md").read_text(), paste().pasted
    assert pasted(text) == text, "run: python docs/paste_cost.py"
    assert pasted(text.replace("| ring | 2(p-1) (alpha", "| ring | 3(p-1) (alpha")) == text
    assert pasted(text.replace("2P - 2 = 14", "2P - 2 = 15")) == text


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_the_errors_on_the_page_are_those_of_the_command() -> None:
    from drumline.costs.networks import validate_collectives

    table = paste().collectives(validate_collectives(PUBLISHED, leave_one_out=False))
    assert table in (DOCS / "cost.md").read_text(), "run: python docs/paste_cost.py published_collectives.csv"


def test_links_lead_somewhere() -> None:
    for name in PAGES:
        for link in re.findall(r"\]\(([^)#]+\.md)\)", (DOCS / name).read_text()):
            assert (DOCS / link).exists(), f"{name}: {link}"
