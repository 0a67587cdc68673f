"""Read JSON with comments and trailing commas, which DeepSpeed's own parser allows.

Both are blanked out before the strict parser of the standard library reads the text, so its line numbers stay right.
hjson is unmaintained and reads unquoted text such as `True` as a string; json5 does not allow `#` comments.
"""

from __future__ import annotations

import json
import re
from typing import Any

_STRING = r'"(?:\\.|[^"\\\n])*+"'  # possessive: a long string must not be kept as a stack of choices
_COMMENTS = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.S)
_COMMAS = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_PYTHON = {"True": "true", "False": "false", "None": "null", "'": 'strings in "double quotes"'}


def parse(text: str) -> Any:
    """The document.

    Raises ValueError with the line. Duplicate keys and infinite numbers are refused.
    """
    plain = _COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))
    try:
        return json.loads(plain, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as e:
        raise ValueError(f"line {e.lineno}: {e.msg}, at {_near(e)}{_hint(e)}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _blank(match: re.Match[str]) -> str:
    """Keep strings; replace anything else by spaces, except line ends."""
    text = match.group()
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)


def _near(e: json.JSONDecodeError) -> str:
    rest = e.doc[e.pos :].split("\n")[0].strip()
    return repr(rest[:30]) if rest else "the end of the line" if e.pos < len(e.doc) else "the end of the file"


def _hint(e: json.JSONDecodeError) -> str:
    """The JSON spelling of a Python literal."""
    rest = e.doc[e.pos :].lstrip()
    word = next((w for w in _PYTHON if rest.startswith(w)), "")
    return f" (JSON has {_PYTHON[word]})" if word else ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in names if names.count(k) > 1)!r} is given twice")
    return table


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a finite number")
