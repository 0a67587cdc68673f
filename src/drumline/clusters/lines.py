"""On which line of a TOML file a dotted key stands: who reads the values does not know, and people want to go there."""

from __future__ import annotations

import re
from collections import Counter

_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?\Z")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_WORD = re.compile(r""""[^"]*"|'[^']*'|[A-Za-z0-9_-]+""")

_Path = tuple[str, ...]


def line_of(text: str, key: str) -> int | None:
    """The line, from 1, of a key such as `node.link.alpha` or `device.curve.0.rates`; of its table if it is missing.

    A key inside of an inline table stands on that table's line. None where not even the first word is found.
    """
    wanted = tuple(key.split("."))
    best, found = 0, None
    for number, path in _paths(text):
        shared = _shared(path, wanted)
        if shared == len(path) and shared > best:
            best, found = shared, number
    return found


def _paths(text: str) -> list[tuple[int, _Path]]:
    """(line, path) of every header and key; elements of arrays of tables are numbered."""
    paths: list[tuple[int, _Path]] = []
    seen: Counter[_Path] = Counter()
    table: _Path = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            words = _words(header[2])
            table = _numbered(words[:-1], seen) + words[-1:]
            if header[1] == "[[":
                seen[words] += 1
                table += (str(seen[words] - 1),)
            elif seen[words]:
                table = _numbered(words, seen)
            paths.append((number, table))
        elif key := _KEY.match(line):
            paths.append((number, table + _words(key[1])))
    return paths


def _numbered(words: _Path, seen: Counter[_Path]) -> _Path:
    """The path with the number of the latest element behind each array of tables."""
    path: list[str] = []
    for i, word in enumerate(words, 1):
        path.append(word)
        if seen[words[:i]]:
            path.append(str(seen[words[:i]] - 1))
    return tuple(path)


def _words(text: str) -> _Path:
    return tuple(word.strip("\"'") for word in _WORD.findall(text))


def _shared(path: _Path, wanted: _Path) -> int:
    count = 0
    for a, b in zip(path, wanted, strict=False):
        if a != b:
            break
        count += 1
    return count
