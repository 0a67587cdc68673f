"""Run the lessons of the course and rewrite their output: each ```text block after a ```python block.

python docs/paste_course.py            all lessons
python docs/paste_course.py 07         those whose name begins so
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COURSE = Path(__file__).parent / "course"
_BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```\n", re.S)
_CHANGE = re.compile(r"^- Change `([^`]+)` to `([^`]+)`\.\s+It prints `([^`]+)`", re.M)


def lessons() -> list[Path]:
    """The pages with a number, in order."""
    return sorted(COURSE.glob("[0-9][0-9]-*.md"))


def outputs(codes: list[str], name: str) -> Iterator[str]:
    """What each part of a lesson prints; all parts share their variables, as in a notebook."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(codes, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"<{name}, part {number}>", "exec", dont_inherit=True), space)  # noqa: S102  # our page
        yield printed.getvalue()


def codes_of(text: str) -> list[str]:
    """The parts of a lesson's program."""
    return [match["code"] for match in _BLOCK.finditer(text)]


def pasted(text: str, name: str) -> str:
    """The page with the output of its program."""
    each = outputs(codes_of(text), name)
    return _BLOCK.sub(lambda m: f"```python\n{m['code']}```\n\n```text\n{next(each).rstrip()}\n```\n", text)


def changes(text: str) -> list[tuple[str, str, str]]:
    """What a lesson asks to change: (old code, new code, a part of what it then prints)."""
    return [(a, b, c) for a, b, c in _CHANGE.findall(text)]


def changed_output(text: str, old: str, new: str, name: str) -> str:
    """What the whole program prints after one change."""
    codes = codes_of(text)
    if not any(old in code for code in codes):
        raise ValueError(f"{name}: no {old!r} to change")
    return "".join(outputs([code.replace(old, new) for code in codes], name))


if __name__ == "__main__":
    for page in lessons():
        if len(sys.argv) == 1 or any(page.name.startswith(word) for word in sys.argv[1:]):
            page.write_text(pasted(page.read_text(encoding="utf-8"), page.name), encoding="utf-8")
