"""Checked access to the config of another tool: `"auto"` is recorded, and no key is dropped silently."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import InputError, nearest
from ..core.regular_files import LARGEST_CONFIG, check_tables
from . import relaxed_json, yaml_text

DEEPEST = 20
"""Maximum nesting of a config."""


def read_table(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The table of a JSON or YAML file (or the given table), and its name in errors."""
    if isinstance(source, Mapping):
        return source, "the config"
    text, where = files.read_text(source, most=LARGEST_CONFIG), str(source)
    kind = "YAML" if Path(source).suffix.lower() in (".yaml", ".yml") else "JSON"
    try:
        table = yaml_text.parse(text) if kind == "YAML" else relaxed_json.parse(text)
        check_tables(table)
    except ValueError as e:
        raise InputError(f"{source} is not a config", where=where, rule=f"{kind}: {e}") from None
    if not isinstance(table, dict):
        raise InputError(f"{source} is not a config", where=where, rule=f"a table, not a {type(table).__name__}")
    return table, where


def _is_off(value: Any) -> bool:
    return not (value.get("enabled", True) if isinstance(value, Mapping) and value else value)


@dataclass(slots=True)
class KeyLog:
    """Outcome of the keys, in the order they were read."""

    auto: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class ConfigReader:
    """One table of a config. Each key is read once; `close` reports the rest."""

    def __init__(self, table: Any, where: str, log: KeyLog, path: str = "") -> None:
        if not isinstance(table, Mapping):
            raise InputError(f"{path} is {table!r:.60}", where=f"{where}: {path}", rule="a table of keys")
        if path.count(".") > DEEPEST:
            raise InputError(f"{where} is nested too deeply", where=f"{where}: {path[:60]}")
        self.table, self.where, self.log, self.path = table, where, log, path
        self._asked: set[str] = set()

    def name(self, key: str) -> str:
        """The full name of a key: `fp16.enabled`."""
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str) -> Any:
        """The value as written; None if it is missing or "auto"."""
        self._asked.add(key)
        value = self.table.get(key)
        if isinstance(value, str) and value.lower() == "auto":
            if self.name(key) not in self.log.auto:
                self.log.auto.append(self.name(key))
            return None
        return value

    def integer(self, key: str, least: int = 0) -> int | None:
        """An integer; 5e8 is one."""
        value = self.number(key)
        if value is not None and (value != int(value) or value < least or value > 2**62):
            raise self.bad_value(key, f"a whole number of at least {least}")
        return None if value is None else int(value)

    def number(self, key: str, least: float = -math.inf) -> float | None:
        """A finite number."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            raise self.bad_value(key, "a number" if least == -math.inf else f"a number of at least {least:g}")
        return value

    def flag(self, key: str) -> bool | None:
        """true or false."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.bad_value(key, "true or false")
        return value

    def flag_or_word(self, key: str) -> bool | None:
        """true or false, also as the strings 'true', 'yes', 'false', 'no'."""
        value = self.value(key)
        if isinstance(value, str) and value.lower() in ("true", "yes", "false", "no"):
            return value.lower() in ("true", "yes")
        if value is not None and not isinstance(value, bool):
            raise self.bad_value(key, "true or false")
        return value

    def word(self, key: str, words: Iterable[str] = ()) -> str | None:
        """A string, one of `words` if given."""
        value = self.value(key)
        if value is None:
            return None
        words = list(words)
        if not isinstance(value, str) or (words and value.lower() not in words):
            rule = f"one of {', '.join(words)}" if words else "a word"
            raise self.bad_value(key, rule, nearest(str(value).lower(), words))
        return value.lower() if words else value

    def section(self, key: str) -> ConfigReader:
        """The table under a key, empty if missing."""
        value = self.value(key)
        return ConfigReader({} if value is None else value, self.where, self.log, self.name(key))

    def ignore(self, key: str, reason: str) -> None:
        """Report a key as having no effect."""
        self._asked.add(key)
        self.log.ignored[self.name(key)] = reason

    def close(self, reasons: Mapping[str, str], when_on: str = "") -> None:
        """Report the keys that were not read: known ones with the reason why they have no effect, others as unknown.

        Keys with the reason `when_on` are reported only if they are on.
        """
        for key, value in self.table.items():
            if key in self._asked or (reasons.get(key) == when_on and _is_off(value)):
                continue
            if key in reasons:
                self.ignore(key, reasons[key])
            else:
                self.log.unknown[self.name(key)] = nearest(str(key), [*reasons, *self._asked])

    def bad_value(self, key: str, rule: str, fix: str = "") -> InputError:
        """The error for an invalid value."""
        return InputError(
            f"{self.name(key)} is {str(self.table.get(key))[:60]!r}",
            where=f"{self.where}: {self.name(key)}",
            rule=f"{self.name(key)} is {rule}",
            fix=fix,
        )
