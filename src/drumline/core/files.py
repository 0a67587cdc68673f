"""Files of users (TOML) and of programs (JSON), read into frozen dataclasses.

Unknown keys are refused with the nearest known one; errors name the file and the key.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import tempfile
import textwrap
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .errors import CorruptFile, InputError, nearest

T = TypeVar("T")
LARGEST_FILE = 64 * 2**20
"""Bytes; larger files are refused."""
MAX_LINE = 100
"""Characters of a line of numbers, at most."""
_NUMBERS = re.compile(r"\[\n((?:\s*[-+.\w]+,\n)+)\s*\]")
"""An array of numbers as tomli-w writes it, one per line; strings have quotes."""


def read_text(path: str | Path, error: type[InputError] = InputError) -> str:
    """The text of a user's file, or an error with the reason why it cannot be read."""
    path = Path(path)
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise error(f"{path} is too large to be a description", rule=f"at most {LARGEST_FILE} bytes")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise error(f"no file {path}", fix=near) from None
    except IsADirectoryError:
        raise error(f"{path} is a folder, not a file") from None
    except UnicodeDecodeError as e:
        raise error(f"{path} is not text", rule=f"UTF-8; byte {e.start} is not") from None
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror}") from None


def read_toml(path: str | Path, error: type[InputError] = InputError) -> dict[str, Any]:
    """The table of a user's TOML file."""
    try:
        return tomllib.loads(read_text(path, error))
    except tomllib.TOMLDecodeError as e:
        raise error(f"{path} is not TOML", where=str(path), rule=str(e)) from None
    except RecursionError:
        raise error(f"{path} is not TOML", where=str(path), rule="nested too deeply") from None


def read_json(path: str | Path) -> Any:
    """The document of a program's JSON file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as e:
        raise CorruptFile(f"{path} is damaged", where=str(path), rule=f"JSON: {e}") from None


def write_text(path: str | Path, text: str) -> None:
    """Write the whole file or nothing: to a temporary file in the same folder, then rename."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as e:
        raise InputError(f"{path} cannot be written: {e.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as e:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {e.strerror}") from None


def write_json(path: str | Path, value: Any) -> None:
    """Write a dataclass, or plain data, as one JSON document."""
    write_text(path, json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n")


def write_toml(path: str | Path, value: Any, comment: str = "") -> None:
    """Write a dataclass, or a table, as TOML, with comment lines on top."""
    import tomli_w

    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    text = _NUMBERS.sub(_in_lines, tomli_w.dumps(to_plain(value)))
    write_text(path, (head + "\n" if head else "") + text)


def _in_lines(numbers: re.Match[str]) -> str:
    """An array of numbers in few lines, which is readable row by row."""
    items = numbers[1].split()
    line = f"[{' '.join(items).removesuffix(',')}]"
    if len(line) <= MAX_LINE:
        return line
    body = textwrap.fill(" ".join(items), MAX_LINE, initial_indent="    ", subsequent_indent="    ")
    return f"[\n{body}\n]"


def to_plain(value: Any) -> Any:
    """Convert dataclasses to tables without default values and tuples to lists; refuse infinities."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        table = {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            default = (
                f.default
                if f.default is not dataclasses.MISSING
                else (f.default_factory() if f.default_factory is not dataclasses.MISSING else dataclasses.MISSING)
            )
            if item is None or (default is not dataclasses.MISSING and item == default):
                continue
            table[f.name] = to_plain(item)
        return table
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} has no file form")
    return value


def from_plain(cls: type[T], data: Any, where: str, error: type[InputError | CorruptFile] = InputError) -> T:
    """Build the dataclass `cls` from a table; refuse unknown keys and wrong types, naming file and key.

    A class may keep reading keys that it no longer writes: `OLD_KEYS: ClassVar = {"old": "new"}`.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(cls).validate_python(rename_old_keys(cls, data))
    except ValidationError as e:
        problems = e.errors(include_url=False)
        # a misspelt key is also a missing one, but the former says more
        problem = next((p for p in problems if p["type"] == "unexpected_keyword_argument"), problems[0])
        path = [str(part) for part in problem["loc"]]
        key = ".".join(path)
        if problem["type"] == "unexpected_keyword_argument":
            raise error(
                f"unknown key {path[-1]!r}", where=f"{where}: {key}", fix=nearest(path[-1], _known(cls, path[:-1]))
            ) from None
        if problem["type"] == "missing_argument" or problem["type"] == "missing":
            raise error(f"key {path[-1]!r} is missing", where=f"{where}: {key}") from None
        text = problem["msg"].removeprefix("Value error, ")
        given = "" if text.startswith(repr(problem["input"])) else f"; given {str(problem['input'])[:60]!r}"
        raise error(f"{key or 'the file'}: {text}{given}", where=f"{where}: {key}") from None


def rename_old_keys(kind: Any, data: Any) -> Any:
    """Plain data with the keys of earlier releases replaced by the current ones, in nested tables too."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(data, dict):
        old_keys: dict[str, str] = getattr(kind, "OLD_KEYS", {})
        table: dict[str, Any] = {}
        for key, value in data.items():
            new = old_keys.get(str(key), str(key))
            table[key if new in data else new] = value
        hints = _hints(kind)
        return {key: rename_old_keys(hints.get(key), value) for key, value in table.items()}
    arguments = get_args(kind)
    if not arguments or not isinstance(data, dict | list | tuple):
        return data
    if isinstance(data, dict):
        inner = next((a for a in arguments if dataclasses.is_dataclass(a)), arguments[-1])
        if dataclasses.is_dataclass(inner) and get_origin(kind) is not dict:  # a dataclass or None
            return rename_old_keys(inner, data)
        return {key: rename_old_keys(arguments[-1], value) for key, value in data.items()}
    inner = next((a for a in arguments if dataclasses.is_dataclass(a) or get_args(a)), None)
    return [rename_old_keys(inner, value) for value in data] if inner is not None else data


def current_key(kind: Any, key: str) -> str:
    """A dotted key of the file form of `kind` with the words of earlier releases replaced by the current ones."""
    words = []
    for word in key.split("."):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            word = getattr(kind, "OLD_KEYS", {}).get(word, word)
            kind = _hints(kind).get(word)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[-1]
        while not dataclasses.is_dataclass(kind) and get_origin(kind) is not dict and get_args(kind):
            kind = get_args(kind)[0]  # the dataclass of `X | None` and `tuple[X, ...]`
        words.append(word)
    return ".".join(words)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _known(cls: Any, path: list[str]) -> list[str]:
    """The field names of the dataclass at `path` below `cls`."""
    for part in path:
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            cls = _hints(cls).get(part, cls)
        while not dataclasses.is_dataclass(cls) and get_args(cls):
            inner = [a for a in get_args(cls) if dataclasses.is_dataclass(a) or get_args(a)]
            if not inner:
                break
            cls = inner[-1]
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
