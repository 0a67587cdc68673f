"""Writes the column "now" of log/structure.md: counts of the source tree, by the functions of the tests.

python docs/paste_structure.py
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "drumline"
PAGE = ROOT / "docs" / "log" / "structure.md"
MARKS = ("<!-- structure -->\n", "<!-- /structure -->")
SKIP = re.compile(r"#\s*fmt:\s*skip")
FOUND = re.compile(r"\bfound\b")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs")]

import paste_map  # noqa: E402  # next to this file
import source_tree  # noqa: E402  # of the tests
import test_house as house  # noqa: E402  # of the tests
from source_tree import syntax  # noqa: E402  # of the tests


def counts() -> list[str]:
    """The cells of the column, in the order of the rows."""
    texts = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    others = [p.read_text() for d in ("tests", "benchmarks", "examples") for p in (ROOT / d).rglob("*.py")]
    skipped, elsewhere = (sum(len(SKIP.findall(text)) for text in part) for part in (texts.values(), others))
    nodes = [node for text in texts.values() for node in syntax(text).body if isinstance(node, ast.ClassDef)]
    classes = Counter(node.name for node in nodes if not node.name.startswith("_"))
    private = [p.relative_to(SOURCE).parts[0] for p, t in texts.items() if house.private_torch_names(syntax(t))]
    outside = len(private) - private.count("torchkit")
    map_page = (ROOT / "docs" / "design.md").read_text()
    without_leaves, with_leaves = room_changes()
    return [
        f"{len(texts):,}",
        f"{sum(text.count(chr(10)) for text in texts.values()):,}",
        f"{skipped}; {skipped + elsewhere}",
        f"{sum(bool(FOUND.search(text)) for text in texts.values())}",
        f"{sum(count > 1 for count in classes.values())}",
        f"{len(source_tree.mutual_imports())}",
        f"{len(private)}, {f'{outside} not' if outside else 'all'} in `torchkit`",
        f"{sum(line not in map_page for line in paste_map.lines(SOURCE))}",
        f"{without_leaves}",
        f"{with_leaves}",
        "not counted",
    ]


def room_changes() -> tuple[int, int]:
    """The two counts of benchmarks/room_changes.py."""
    command = [sys.executable, str(ROOT / "benchmarks" / "room_changes.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return int(lines[0].split()[0]), int(lines[1].split()[0])


def pasted(page: str, cells: list[str], day: str) -> str:
    """The page with these cells in the last column, and the day."""
    before, rest = page.split(MARKS[0])
    table, after = rest.split(MARKS[1])
    rows = [line.strip("| ") for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(cells), "a row without a count"
    kept = [" | ".join(row.split(" | ")[:3]) for row in rows]
    lines = ["| | before | after | now |", "|---|---:|---:|---:|"]
    lines += [f"| {row} | {cell} |" for row, cell in zip(kept, cells, strict=True)]
    lines += ["", f"Now: {day}, pasted by `python docs/paste_structure.py`.", ""]
    return f"{before}{MARKS[0]}{chr(10).join(lines)}{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(pasted(PAGE.read_text(), counts(), date.today().isoformat()))
