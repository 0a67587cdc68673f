"""Reading the config of another tool: every value is checked, `"auto"` is noted, and no key is dropped in silence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import InputError, nearest
from . import plain_yaml, relaxed

DEEPEST = 20
"""No config is nested deeper."""


def read_table(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The table of a JSON or YAML file, or the one given, and what to call it in errors."""
    if isinstance(source, Mapping):
        return source, "the config"
    text, where = files.read_text(source), str(source)
    kind = "YAML" if Path(source).suffix.lower() in (".yaml", ".yml") else "JSON"
    try:
        table = plain_yaml.parse(text) if kind == "YAML" else relaxed.parse(text)
    except ValueError as e:
        raise InputError(f"{source} is not a config", where=where, rule=f"{kind}: {e}") from None
    if not isinstance(table, dict):
        raise InputError(f"{source} is not a config", where=where, rule=f"a table, not a {type(table).__name__}")
    return table, where


def _is_off(value: Any) -> bool:
    return not (value.get("enabled", True) if isinstance(value, Mapping) and value else value)


@dataclass(slots=True)
class Log:
    """What became of the keys, in the order in which they were met."""

    auto: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Reader:
    """One table of a config. Each key is asked for once; `close` accounts for the rest."""

    def __init__(self, table: Any, where: str, log: Log, path: str = "") -> None:
        if not isinstance(table, Mapping):
            raise InputError(f"{path} is {table!r:.60}", where=f"{where}: {path}", rule="a table of keys")
        if path.count(".") > DEEPEST:
            raise InputError(f"{where} is nested too deeply", where=f"{where}: {path[:60]}")
        self.table, self.where, self.log, self.path = table, where, log, path
        self._asked: set[str] = set()

    def name(self, key: str) -> str:
        """The whole name of a key: `fp16.enabled`."""
        return f"{self.path}.{key}" if self.path else key

    def given(self, key: str) -> Any:
        """The value as it stands; None where there is none, or where it is left open by "auto"."""
        self._asked.add(key)
        value = self.table.get(key)
        if isinstance(value, str) and value.lower() == "auto":
            if self.name(key) not in self.log.auto:
                self.log.auto.append(self.name(key))
            return None
        return value

    def whole(self, key: str, least: int = 0) -> int | None:
        """A whole number; 5e8 is one."""
        value = self.number(key)
        if value is not None and (value != int(value) or value < least or value > 2**62):
            raise self.wrong(key, f"a whole number of at least {least}")
        return None if value is None else int(value)

    def number(self, key: str, least: float = -math.inf) -> float | None:
        """Any finite number."""
        value = self.given(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            raise self.wrong(key, "a number" if least == -math.inf else f"a number of at least {least:g}")
        return value

    def flag(self, key: str) -> bool | None:
        """true or false."""
        value = self.given(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def switch(self, key: str) -> bool | None:
        """true or false, also where they were written as words: 'false', 'no'."""
        value = self.given(key)
        if isinstance(value, str) and value.lower() in ("true", "yes", "false", "no"):
            return value.lower() in ("true", "yes")
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def word(self, key: str, words: Iterable[str] = ()) -> str | None:
        """A word, of those named if any are."""
        value = self.given(key)
        if value is None:
            return None
        words = list(words)
        if not isinstance(value, str) or (words and value.lower() not in words):
            rule = f"one of {', '.join(words)}" if words else "a word"
            raise self.wrong(key, rule, nearest(str(value).lower(), words))
        return value.lower() if words else value

    def section(self, key: str) -> Reader:
        """The table under a key; an empty one where there is none."""
        value = self.given(key)
        return Reader({} if value is None else value, self.where, self.log, self.name(key))

    def ignore(self, key: str, reason: str) -> None:
        """Account for a key that has no effect here."""
        self._asked.add(key)
        self.log.ignored[self.name(key)] = reason

    def close(self, reasons: Mapping[str, str], when_on: str = "") -> None:
        """List the keys that nobody asked for: known ones with the reason why they have no effect, others by name.

        A key that is off says what holds here anyway; the reason `when_on` is told of the others only.
        """
        for key, value in self.table.items():
            if key in self._asked or (reasons.get(key) == when_on and _is_off(value)):
                continue
            if key in reasons:
                self.ignore(key, reasons[key])
            else:
                self.log.unknown[self.name(key)] = nearest(str(key), [*reasons, *self._asked])

    def wrong(self, key: str, rule: str, fix: str = "") -> InputError:
        """The error for a value that cannot be."""
        return InputError(
            f"{self.name(key)} is {str(self.table.get(key))[:60]!r}",
            where=f"{self.where}: {self.name(key)}",
            rule=f"{self.name(key)} is {rule}",
            fix=fix,
        )
