"""Reads files that users name, within limits: regular files only, of a bounded size, and text of a bounded structure.

Every file from outside comes through here, so a pipe cannot block a command, a device cannot fill the memory, and a
small file cannot become a large one when it is parsed.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import InputError, nearest

LARGEST_FILE = 64 * 2**20
"""Bytes of a file that a program wrote; larger files are refused."""
LARGEST_TOML = 4 * 2**20
"""Bytes of a TOML file, which people edit."""
LARGEST_CONFIG = 2**18
"""Bytes of another tool's config. The longest that was seen in public has 10 KB; YAML is read at 0.1 MB a second."""
LONGEST_LINE = 2**20
"""Bytes of a line of a file that is read line by line."""
MOST_VALUES = 5_000_000
"""Values in a document: each takes about 100 bytes in memory, however short its text."""
MOST_KEYS = 100_000
"""Keys in one table: each unknown one takes 1.4 kB until the first is reported."""
DEEPEST = 100
"""Levels of tables and lists inside each other."""
_MOST_PARTS = 32
"""Parts of a dotted TOML key. The parser's memory grows with the square of their number."""
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MOST_PARTS},}}+")


def open_regular(path: str | Path, error: type[InputError] = InputError) -> io.BufferedReader:
    """Open a regular file for reading, or raise with the reason; never waits, also not for the writer of a pipe."""
    path = Path(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error(f"no file {path}", fix=_nearest_file(path)) from None
    except ValueError as e:  # a null character
        raise error(f"{str(path)!r} is not a file name", rule=str(e)) from None
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise error(f"{path} is a folder, not a file")
        raise error(f"{path} is not a regular file", rule="pipes, sockets and devices are not read")
    return os.fdopen(handle, "rb")


def read_bytes(path: str | Path, error: type[InputError] = InputError, *, most: int = LARGEST_FILE) -> bytes:
    """The bytes of a user's file, at most `most` of them."""
    with open_regular(path, error) as f:
        try:
            data = b"" if os.fstat(f.fileno()).st_size > most else f.read(most + 1)
            larger = bool(f.read(1))  # the size alone says too little: files of /proc have none, and others grow
        except OSError as e:
            raise error(f"{path} cannot be read: {e.strerror}") from None
    if larger or len(data) > most:
        raise error(f"{path} is too large to be a description", rule=f"at most {most} bytes")
    return data


def read_text(path: str | Path, error: type[InputError] = InputError, *, most: int = LARGEST_FILE) -> str:
    """The text of a user's file, or an error with the reason why it cannot be read."""
    try:
        text = read_bytes(path, error, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise error(f"{path} is not text", rule=f"UTF-8; byte {e.start} is not") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: str | Path, error: type[InputError] = InputError) -> Iterator[bytes]:
    """The lines of a file of any length, one at a time, with their ends."""
    with open_regular(path, error) as f:
        number = 0
        while line := f.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                where = f"{path}, line {number}"
                raise error(f"a line of {path} is too long", where=where, rule=f"at most {LONGEST_LINE} bytes")
            yield line


def sha256(path: str | Path, error: type[InputError] = InputError) -> str:
    """The digest of a file of any size."""
    with open_regular(path, error) as f:
        try:
            return hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            raise error(f"{path} cannot be read: {e.strerror}") from None


def check_structure(text: str) -> None:
    """Raise ValueError for a text, TOML or JSON, that would take far more memory when parsed than it has bytes."""
    values = sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise ValueError(f"at most {MOST_VALUES} values, here up to {values}")


def check_dotted_keys(text: str) -> None:
    """Raise ValueError for a TOML key of too many parts, with its line."""
    if match := _LONG_KEY.search(text):
        line = text.count("\n", 0, match.start()) + 1
        key = match[0][:40]
        raise ValueError(f"a key has at most {_MOST_PARTS} parts (at line {line}: {key}...)")


def check_tables(value: object, depth: int = 0) -> None:
    """Raise ValueError for tables with too many keys, or nested too deeply."""
    if depth > DEEPEST:
        raise ValueError(f"nested too deeply: at most {DEEPEST} levels")
    if isinstance(value, dict):
        if len(value) > MOST_KEYS:
            raise ValueError(f"a table has at most {MOST_KEYS} keys, here {len(value)}")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list):
                check_tables(item, depth + 1)


def _nearest_file(path: Path) -> str:
    try:
        return nearest(path.name, [p.name for p in path.parent.iterdir()])
    except OSError:
        return ""
