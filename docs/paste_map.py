"""Write the map of all modules into docs/design.md, from the first sentence of each: `python docs/paste_map.py`."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "drumline"
PAGE = ROOT / "docs" / "design.md"
MARKS = ("<!-- map -->\n", "<!-- /map -->")
WIDTH = 118


@functools.cache
def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return text.partition(". ")[0].rstrip(".")


def lines(folder: Path, depth: int = 0) -> list[str]:
    """One line for each module of a package, sub-packages last."""
    indent = "    " + "  " * depth
    package = folder / "__init__.py"
    name = folder.relative_to(SOURCE.parent).as_posix() if depth == 0 else folder.name
    rows = [_line(f"{indent}{name}/", first_sentence(package) if package.exists() else "")]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            rows.append(_line(f"{indent}  {path.name}", first_sentence(path)))
    for inner in sorted(p for p in folder.iterdir() if p.is_dir() and any(p.rglob("*.py"))):
        rows += lines(inner, depth + 1)
    return rows


def _line(name: str, text: str) -> str:
    room = WIDTH - max(32, len(name) + 2)
    if len(text) > room:
        text = text[: room - 3].rsplit(" ", 1)[0]
        text = (text.rpartition("`")[0].rstrip() if text.count("`") % 2 else text) + "..."  # no code without its end
    return f"{name:<30}  {text}".rstrip()


def pasted(page: str) -> str:
    """The page with a fresh map."""
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}{chr(10).join(lines(SOURCE))}\n{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(pasted(PAGE.read_text()))
