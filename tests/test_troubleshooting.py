"""docs/troubleshooting.md quotes only what the code can print, and leads from every symptom to its section."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Every text of the source, with `...` for the values in it."""
    texts = []
    for path in sorted((ROOT / "src" / "drumline").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def is_printed(quote: str, printed: list[str]) -> bool:
    """Check that a text of the source contains all words of the quote, in order."""
    pieces = [re.escape(piece) for piece in quote.split("...")]
    pattern = re.compile(".*?".join(pieces), re.S)
    return any(pattern.search(text) for text in printed)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_that_the_code_prints(quote: str, printed: list[str]) -> None:
    assert len(re.sub(r"\W|\.\.\.", "", quote)) > 8, "too short to be a quote"
    assert is_printed(quote, printed)


def test_other_texts_are_not_taken_for_messages(printed: list[str]) -> None:
    assert not is_printed("rank ... was ended by a signal called ...", printed)
    assert not is_printed("the loss is ... in step ...", printed)


def test_every_section_has_its_symptom_and_a_quote() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    anchors = [re.sub(r"[^\w-]", "", s.partition("\n")[0].lower().replace(" ", "-")) for s in sections]
    assert re.findall(r"\]\(#([\w-]+)\)", PAGE.partition("\n## ")[0]) == anchors
    assert len(anchors) >= 12 and all("```text\n" in s for s in sections)
