"""The course: every lesson prints what its page shows, and each change that it proposes shows what the page promises."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "docs" / "paste_course.py"
SPEC = importlib.util.spec_from_file_location("paste_course", PATH)
assert SPEC and SPEC.loader
course = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(course)

STARTS_RANKS = ("dl.verify(", "dl.train(", "dl.spawn(")
QUICK = ("05",)
"""Lessons that start ranks and still are among the quick tests."""


def marks(page: Path) -> list[pytest.MarkDecorator]:
    ranks = any(call in page.read_text() for call in STARTS_RANKS)
    return [pytest.mark.slow] if ranks and not page.name.startswith(QUICK) else []


PAGES = [pytest.param(page, marks=marks(page), id=page.stem) for page in course.lessons()]
CHANGES = [
    pytest.param(page, *change, marks=marks(page) or ([pytest.mark.slow] if page.name.startswith(QUICK) else []))
    for page in course.lessons()
    for change in course.changes(page.read_text())
]


def test_there_are_fourteen_lessons() -> None:
    numbers = [page.name[:2] for page in course.lessons()]
    assert numbers == [f"{n:02}" for n in range(1, 15)]
    index = (course.COURSE / "index.md").read_text()
    for page in course.lessons():
        text = page.read_text()
        assert f"]({page.name})" in index
        assert len(course.changes(text)) >= 2, f"{page.name}: something to change and see"
        for heading in ("## Idea", "## Formula", "## Run it", "## Change this and see"):
            assert heading in text, f"{page.name}: {heading}"


@pytest.mark.parametrize("page", PAGES)
def test_a_lesson_prints_what_it_shows(page: Path) -> None:
    text = page.read_text()
    assert course.codes_of(text)
    assert course.pasted(text, page.name) == text, "run: python docs/paste_course.py"


@pytest.mark.parametrize(("page", "old", "new", "shows"), CHANGES)
def test_a_change_shows_what_is_promised(page: Path, old: str, new: str, shows: str) -> None:
    assert shows in course.changed_output(page.read_text(), old, new, page.name)


def test_an_output_that_differs_is_found() -> None:
    page = "```python\nx = 1\n```\n\n```text\n```\n\n```python\nprint(x + 1)\n```\n\n```text\n3\n```\n"
    assert course.pasted(page, "page").count("\n2\n") == 1
    assert course.changed_output(page, "x = 1", "x = 5", "page") == "6\n"
    with pytest.raises(ValueError, match="no 'y = 1' to change"):
        course.changed_output(page, "y = 1", "y = 2", "page")
