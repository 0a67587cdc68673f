"""The part of YAML that configs are written in, read and written: tables by indentation, lists, and single values.

`accelerate config` writes no more than that. A reader of our own is small, needs no other package, and can name the
line; anchors, tags and texts over several lines are refused by name, never guessed at.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEEPEST = 20
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_REAL = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?")
_OTHER_NUMBER = re.compile(r"[-+]?0[0-9xob_]+[0-9a-fA-F_]*|[-+]?[0-9]+(:[0-5]?[0-9])+|[-+]?\.(inf|nan)", re.I)
_QUOTED = r'"(?:\\.|[^"\\])*"|\'(?:\'\'|[^\'])*\''
_KEY = re.compile(rf"({_QUOTED}|[^\s\[\]{{}},&*!|>'\"%@`#-][^#]*?|-[^\s#][^#]*?)\s*:(?=\s|$)")
_FLOW = re.compile(
    rf"\s*({_QUOTED}|[\[\]{{}},]|:(?=[\s,\]}}]|$)|[^\s,\[\]{{}}\"':][^,\[\]{{}}:]*(?::\S[^,\[\]{{}}:]*)*)"
)
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.,+-]*")


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    indent: int
    text: str


def parse(text: str) -> Any:
    """The document. Raises ValueError with the line."""
    lines = list(_lines(text))
    if not lines:
        return None
    value, rest = _block(lines, 0, lines[0].indent, 0)
    if rest < len(lines):
        raise _wrong(lines[rest], "it stands further left than the first line, or between two depths")
    return value


def _lines(text: str) -> Iterator[_Line]:
    """The lines that say something, without comments and without the marks of a document's begin and end."""
    for number, raw in enumerate(text.splitlines(), 1):
        bare = _without_comment(raw).rstrip()
        line = _Line(number, len(bare) - len(bare.lstrip(" ")), bare.strip(" "))
        if line.text.startswith("\t"):
            raise _wrong(line, "tabs are not indentation")
        if line.text == "..." or (line.text == "---" and number > 1 and not _only_comments(text, number)):
            raise _wrong(line, "a config is one document")
        if line.text and line.text != "---":
            if line.text[0] == "%":
                raise _wrong(line, "directives are not read")
            yield line


def _only_comments(text: str, number: int) -> bool:
    return all(not _without_comment(raw).strip() for raw in text.splitlines()[: number - 1])


def _without_comment(raw: str) -> str:
    """The line up to a # at its start or after a space, outside of quotes."""
    quote = ""
    for i, letter in enumerate(raw):
        if quote:
            quote = "" if letter == quote and not (quote == '"' and raw[i - 1] == "\\") else quote
        elif letter in "\"'" and (i == 0 or raw[i - 1] in " [{,:"):
            quote = letter
        elif letter == "#" and (i == 0 or raw[i - 1] in " \t"):
            return raw[:i]
    return raw


def _block(lines: list[_Line], i: int, indent: int, depth: int) -> tuple[Any, int]:
    """The table or list that begins at line i, and the line after it."""
    if depth > DEEPEST:
        raise _wrong(lines[i], "nested too deeply")
    if lines[i].text == "-" or lines[i].text.startswith("- "):
        return _list(lines, i, indent, depth)
    if _KEY.match(lines[i].text):
        return _table(lines, i, indent, depth)
    if lines[i].text[0] in "[{" and i + 1 == len(lines) and depth == 0:
        return _value(lines[i], lines[i].text), i + 1
    raise _wrong(lines[i], "here a line is `key: value`, or `- value`")


def _table(lines: list[_Line], i: int, indent: int, depth: int) -> tuple[dict[str, Any], int]:
    table: dict[str, Any] = {}
    while i < len(lines) and lines[i].indent == indent:
        line = lines[i]
        found = _KEY.match(line.text)
        if not found:
            raise _wrong(line, "here a line is `key: value`")
        key = _name(line, _quoted(line, found[1]) if found[1][0] in "\"'" else _scalar(line, found[1]))
        if key in table:
            raise _wrong(line, f"the key {key!r} is given twice")
        rest = line.text[found.end() :].strip()
        i += 1
        if rest:
            table[key] = _value(line, rest)
        elif i < len(lines) and (lines[i].indent > indent or _is_item(lines[i], indent)):
            table[key], i = _block(lines, i, lines[i].indent, depth + 1)
        else:
            table[key] = None
        _no_deeper(lines, i, indent)
    return table, i


def _is_item(line: _Line, indent: int) -> bool:
    """A list may stand as far left as its key."""
    return line.indent == indent and (line.text == "-" or line.text.startswith("- "))


def _list(lines: list[_Line], i: int, indent: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while i < len(lines) and _is_item(lines[i], indent):
        line, rest = lines[i], lines[i].text[1:].strip()
        if rest and (_KEY.match(rest) or rest.startswith("- ")):
            raise _wrong(line, "items of a list are single values here")
        items.append(_value(line, rest))
        i += 1
        _no_deeper(lines, i, indent)
    return items, i


def _no_deeper(lines: list[_Line], i: int, indent: int) -> None:
    if i < len(lines) and lines[i].indent > indent:
        raise _wrong(lines[i], "it belongs to nothing: a value is one line, a table stands under a key without")


def _value(line: _Line, text: str) -> Any:
    """What stands behind a colon or a dash."""
    if text[:1] in ("[", "{"):
        value, end = _flow(line, text, 0, 0)
        if text[end:].strip():
            raise _wrong(line, f"nothing may follow the {text[0]!r} that was closed")
        return value
    if text[:1] in ("&", "*", "!"):
        raise _wrong(line, "anchors, aliases and tags are not read")
    if text[:1] in ("|", ">"):
        raise _wrong(line, "texts over several lines are not read")
    if text[:1] in ("@", "`", "%"):
        raise _wrong(line, f"a value that begins with {text[0]} stands in quotes")
    if text[:1] in ("'", '"'):
        return _quoted(line, text)
    if re.search(r":(\s|$)", text):
        raise _wrong(line, "a value with a colon in it stands in quotes")
    return _scalar(line, text)


def _flow(line: _Line, text: str, start: int, depth: int) -> tuple[Any, int]:
    """A list in [] or a table in {}, on one line."""
    if depth > DEEPEST:
        raise _wrong(line, "nested too deeply")
    tokens: list[Any] = []
    i = start + 1
    close = {"[": "]", "{": "}"}[text[start]]
    while True:
        found = _FLOW.match(text, i)
        if not found:
            raise _wrong(line, f"the {text[start]!r} is not closed on this line, or what is in it cannot be read")
        word = found[1]
        if word in ("[", "{"):
            inner, i = _flow(line, text, found.start(1), depth + 1)
            tokens.append((inner,))
            continue
        i = found.end()
        if word == close:
            return (_flow_list if close == "]" else _flow_table)(line, tokens), i
        if word in ("]", "}"):
            raise _wrong(line, f"{word!r} closes nothing")
        tokens.append(word if word in (",", ":") else (_value(line, word.strip()),))


def _flow_list(line: _Line, tokens: Sequence[Any]) -> list[Any]:
    if any(t != "," for t in tokens[1::2]) or any(t in (",", ":") for t in tokens[::2]):
        raise _wrong(line, "a list is [a, b, c]")
    return [t[0] for t in tokens[::2]]


def _flow_table(line: _Line, tokens: Sequence[Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for i in range(0, len(tokens), 4):
        part = tokens[i : i + 4]
        if len(part) < 3 or part[1] != ":" or part[0] == "," or part[2] in (",", ":") or part[3:] not in ([], [","]):
            raise _wrong(line, "a table is {key: value, key: value}")
        key = _name(line, part[0][0])
        if key in table:
            raise _wrong(line, f"the key {key!r} is given twice")
        table[key] = part[2][0]
    return table


def _name(line: _Line, key: Any) -> str:
    if not isinstance(key, str):
        raise _wrong(line, "a key that can be read as something else than a word stands in quotes")
    return key


def _quoted(line: _Line, text: str) -> str:
    if not re.fullmatch(_QUOTED, text):
        raise _wrong(line, "a quote is not closed, or something follows it")
    if text[0] == "'":
        return text[1:-1].replace("''", "'")
    try:
        return str(json.loads(text, strict=False))
    except json.JSONDecodeError:
        raise _wrong(line, "in double quotes only JSON's escapes are read") from None


def _scalar(line: _Line, text: str) -> Any:
    """A word, a number, true or false, or nothing."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text.replace("_", ""))
    if _REAL.fullmatch(text):
        number = float(text.replace("_", ""))
        if not math.isfinite(number):
            raise _wrong(line, f"{text} is not a number here")
        return number
    if _OTHER_NUMBER.fullmatch(text):
        raise _wrong(line, f"{text} can be read as a number or as a word: write it in decimals, or in quotes")
    return text


def _wrong(line: _Line, rule: str) -> ValueError:
    return ValueError(f"line {line.number}: {rule}, at {line.text[:40]!r}")


def write(table: Mapping[str, Any], indent: int = 0) -> str:
    """The same subset, so that every reader of YAML understands it in the same way."""
    lines = []
    for key, value in table.items():
        head = f"{' ' * indent}{_text(key)}:"
        if isinstance(value, Mapping) and value:
            lines += [head, write(value, indent + 2).rstrip("\n")]
        elif isinstance(value, list | tuple) and value:
            lines += [head, *(f"{' ' * indent}- {_word(item)}" for item in value)]
        else:
            lines.append(f"{head} {'{}' if isinstance(value, Mapping) else _word(value)}")
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        text = repr(value)  # 1e-05 is a word to readers of YAML 1.1, and 1.0e-05 is a number to all
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return str(value) if isinstance(value, int) else "[]" if value in ((), []) else _text(str(value))


def _text(text: str) -> str:
    """As it stands where nothing can take it for something else, else in quotes."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS and text.lower() not in ("y", "n", ".inf", ".nan"):
        try:
            if _scalar(_Line(0, 0, text), text) == text:
                return text
        except ValueError:
            pass  # it looks like a number in some other writing
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    letters = (c if (c.isprintable() and c not in '"\\') or ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in text)
    return f'"{"".join(letters)}"'
