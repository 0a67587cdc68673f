"""Files of users (TOML) and of programs (JSON), read into frozen dataclasses.

Unknown keys are refused with the nearest known one; errors name the file and the key.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import math
import os
import re
import reprlib
import secrets
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from .errors import CorruptFile, InputError, nearest
from .key_problems import KeyProblem, key_error, required_keys
from .regular_files import LARGEST_TOML, check_dotted_keys, check_structure, check_tables
from .regular_files import read_text as read_text

T = TypeVar("T")
MAX_LINE = 100
"""Characters of a line of numbers, at most."""
_NUMBERS = re.compile(r"\[\n((?:\s*[-+.\w]+,\n)+)\s*\]")
"""An array of numbers as tomli-w writes it, one per line; strings have quotes."""


def read_toml(path: str | Path, error: type[InputError] = InputError) -> dict[str, Any]:
    """The table of a user's TOML file."""
    text = read_text(path, error, most=LARGEST_TOML)
    try:
        check_dotted_keys(text)
        check_structure(text)
        table = tomllib.loads(text)
        check_tables(table)
    except ValueError as e:
        raise error(f"{path} is not TOML", where=str(path), rule=str(e)) from None
    except RecursionError:
        raise error(f"{path} is not TOML", where=str(path), rule="nested too deeply") from None
    return table


def read_json(path: str | Path) -> Any:
    """The document of a program's JSON file."""
    text = read_text(path)
    try:
        check_structure(text)
        document = json.loads(text, object_pairs_hook=_unique_keys)
        check_tables(document)
    except (ValueError, RecursionError) as e:
        raise CorruptFile(f"{path} is damaged", where=str(path), rule=f"JSON: {e}") from None
    return document


def read_csv(path: str | Path) -> str:
    """The text of a CSV file, once every line of it can be read."""
    text = read_text(path)
    reader = csv.reader(io.StringIO(text))
    try:
        for _ in reader:
            pass
    except csv.Error as e:
        raise InputError(f"{path} is not CSV", where=f"{path}: line {reader.line_num}", rule=str(e)) from None
    return text


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:60]!r} is given twice")
    return table


def write_text(path: str | Path, text: str) -> None:
    """Write the whole file or nothing: to a temporary file in the same folder, then rename.

    The file has the permissions that the user's umask gives to new files.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise InputError(f"{path} cannot be written: {e.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(storable_text(text))
        os.replace(temporary, path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {e.strerror}") from None


def storable_text(text: str) -> str:
    """The text with the bytes of undecodable file names as UTF-8, or as `?` where they are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text


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
        return {storable_text(str(k)): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} has no file form")
    return value


def from_plain(
    cls: type[T],
    data: Any,
    where: str,
    error: type[InputError | CorruptFile] = InputError,
    line_of: Callable[[str], int | None] = lambda key: None,
) -> T:
    """Build the dataclass `cls` from a table; refuse unknown keys and wrong types, naming file and keys, all at once.

    A class may keep reading keys that it no longer writes: `OLD_KEYS: ClassVar = {"old": "new"}`. `line_of` gives the
    line of a dotted key in the file, if it is known.
    """
    from pydantic import ValidationError

    try:
        return cast(T, _validator(cast(Any, cls)).validate_python(rename_old_keys(cls, data)))
    except RecursionError:
        raise error(f"{where} is nested too deeply", where=where) from None
    except ValidationError as e:
        problems = {p["loc"]: _problem(cls, p) for p in reversed(e.errors(include_url=False))}
        raise key_error(reversed(problems.values()), where, error, line_of) from None


def _problem(cls: Any, problem: Any) -> KeyProblem:
    """One finding of pydantic in our words."""
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "unexpected_keyword_argument":
        return KeyProblem(f"unknown key {path[-1]!r}", key, fix=nearest(path[-1], _known(cls, path[:-1])))
    if problem["type"] in ("missing_argument", "missing"):
        inner = required_keys(_hints(_class_at(cls, path[:-1])).get(path[-1]), _hints)
        rule = f"{path[-1]} has the keys {', '.join(inner)}" if inner else ""
        return KeyProblem(f"key {path[-1]!r} is missing", key, rule, missing=True)
    text = problem["msg"].removeprefix("Value error, ")
    given = "" if text.startswith(_short(problem["input"])) else f"; given {_short(problem['input'])!r}"
    return KeyProblem(f"{key or 'the file'}: {text}{given}", key)


def _short(value: Any) -> str:
    """The start of a value's text, without writing all of it."""
    return value[:60] if isinstance(value, str) else reprlib.repr(value)[:60]


@functools.cache
def _validator(cls: Any) -> Any:
    """The validator of a class, which stops at the first wrong item of a list: a damaged one may have millions."""
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    def stop_early(schema: Any) -> Any:
        if isinstance(schema, dict):
            changed = {key: stop_early(value) for key, value in schema.items()}
            return changed | ({"fail_fast": True} if schema.get("type") in ("list", "tuple", "set") else {})
        return [stop_early(item) for item in schema] if isinstance(schema, list) else schema

    return SchemaValidator(stop_early(TypeAdapter(cls).core_schema))


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
    kind = _class_at(cls, path)
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _class_at(cls: Any, path: list[str]) -> Any:
    """The dataclass at `path` below `cls`; indices and keys of free tables are skipped."""
    for part in path:
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            cls = _hints(cls).get(part, cls)
        while not dataclasses.is_dataclass(cls) and get_args(cls):
            inner = [a for a in get_args(cls) if dataclasses.is_dataclass(a) or get_args(a)]
            if not inner:
                break
            cls = inner[-1]
    return cls
