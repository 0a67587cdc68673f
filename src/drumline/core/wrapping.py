"""Text folded to a width: at spaces, and words wider than a line after their commas, so that no `key=value` is cut."""

from __future__ import annotations

import itertools
import re
import shutil
from typing import TextIO

_UNITS = "[KMGT]i?B|[KMGTPE]?FLOP|ms|us|ns|s|min|h"
_WORDS = re.compile(rf"\S*\d (?:{_UNITS})(?:/s)?(?![\w=])\S*|\S+")
"""A number and its unit are one word."""
_LABEL = re.compile(r"  (?:where|rule|try): +")
"""The labels of an error's lines."""
_AFTER_COMMA = re.compile(r"(?<=,)(?=\S)")


def break_points(text: str, width: int, *, indent: int = 0) -> list[int]:
    """Offsets in one line of text at which new lines begin; these have `indent` columns less.

    A word that fits into a line is not cut. A wider one is cut after commas, as plans are, and only a part of it that
    is wider than a line is cut anywhere.
    """
    starts: list[int] = []
    begin, room, later = 0, max(1, width), max(1, width - indent)
    for word in _WORDS.finditer(text):
        if word.end() - begin <= room:
            continue
        if word.start() > begin and text[begin : word.start()].strip():
            starts.append(word.start())
            begin, room = word.start(), later
        at = word.start()
        for part in _AFTER_COMMA.split(word[0]):
            if at > begin and at + len(part) - begin > room:
                starts.append(at)
                begin, room = at, later
            while at + len(part) - begin > room:
                begin, room = begin + room, later
                starts.append(begin)
                part, at = part[begin - at :], begin
            at += len(part)
    return starts


def wrap(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Lines of at most that width, the later ones indented."""
    lines: list[str] = []
    for line in text.split("\n"):
        cuts = [0, *break_points(line, width, indent=indent), len(line)]
        parts = [line[a:b].rstrip() for a, b in itertools.pairwise(cuts)]
        lines += [parts[0], *(" " * indent + part for part in parts[1:])]
    return lines


def widest_part(text: str) -> int:
    """Columns of the widest part that is not cut: a word without commas, or a piece between two commas."""
    return max((len(part) for word in _WORDS.findall(text) for part in _AFTER_COMMA.split(word)), default=0)


def for_reader(text: str, stream: TextIO | None) -> str:
    """The text for a stream: folded if it is a terminal, unchanged for a file or a program."""
    if stream is None or not stream.isatty():
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        label = _LABEL.match(line)
        lines += wrap(line, shutil.get_terminal_size().columns, indent=len(label[0]) if label else 2)
    return "\n".join(lines)
