"""Pastes the results of a benchmark between its marks in docs/log/model-parallel.md or another page."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "log" / "model-parallel.md"


def paste(mark: str, lines: Sequence[str], how: str, page: Path | None = None) -> None:
    """Replace the text between `<!-- mark -->` and `<!-- /mark -->`."""
    page = page or PAGE
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{page.name} has no {begin} ... {end}: nothing was pasted")
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    new = "\n".join([begin, *lines, "", f"{when}, {how}.", end])
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.S)
    page.write_text(pattern.sub(lambda _: new, text), encoding="utf-8")
