"""Types of plan keys: how a value is read from the notation or a file, checked, written and documented."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..core.errors import PlanError, nearest
from ..core.key_problems import KeyProblem, key_error
from ..core.units import parse_bytes

MAX_COUNT = 10_000_000
MOST_STEPS = 9_999_999
"""The largest number behind a word, such as the k of `sync=stale:k`."""
MEASURED = ("measured",)
"""Value of `split` that cuts the stages by measured times."""


class KeyType(ABC):
    """Type of the values of a key. `read` and `write` are inverse."""

    rule: str
    """Valid values, as errors say it: `KEY is RULE`."""
    values: str
    """Valid values, as the documentation lists them."""

    @abstractmethod
    def read(self, value: Any) -> Any:
        """The value from text of the notation or from a TOML value; a ValueError if it has another form."""

    def check(self, value: Any) -> bool:
        """Whether a value is valid."""
        return True

    def rule_for(self, value: Any) -> str:
        """The rule that an invalid value breaks."""
        return self.rule

    def write(self, value: Any) -> Any:
        """The TOML form of a value."""
        return value

    def nearest(self, value: Any) -> str:
        """A valid value that is close to an invalid one, in the notation; empty if there is none."""
        return ""


class CountKey(KeyType):
    """A whole number."""

    values = "n"

    def __init__(self, least: int = 1) -> None:
        self.least, self.rule = least, f"a whole number from {least} to {MAX_COUNT}"

    def read(self, value: Any) -> int:
        if isinstance(value, str):
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(self.rule)
        return value

    def check(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= MAX_COUNT

    def nearest(self, value: Any) -> str:
        return str(min(max(value, self.least), MAX_COUNT)) if isinstance(value, int) else ""


class ChoiceKey(KeyType):
    """One of some words or numbers; `old` are words of earlier releases, and what they are called now."""

    def __init__(self, *choices: str | int, old: Mapping[str, str] | None = None) -> None:
        words = [str(choice) for choice in choices]
        self.choices, self.values, self._old = choices, " ".join(words), old or {}
        self.rule = f"{', '.join(words[:-1])} or {words[-1]}"

    def read(self, value: Any) -> str | int:
        return CountKey().read(value) if isinstance(self.choices[0], int) else self._old.get(str(value), str(value))

    def check(self, value: Any) -> bool:
        return value in self.choices


class FlagKey(KeyType):
    """true or false."""

    rule, values = "true or false", "true false"

    def read(self, value: Any) -> bool:
        word = str(value).lower()
        if word not in ("true", "false"):
            raise ValueError(self.rule)
        return word == "true"


class BytesKey(KeyType):
    """A positive number of bytes."""

    rule, values = "a size such as 25MiB, at least 1 byte", "bytes"

    def read(self, value: Any) -> int:
        return int(parse_bytes(value))

    def check(self, value: Any) -> bool:
        return bool(value >= 1)


class TileKey(KeyType):
    """Rows and columns, written `2x2`."""

    rule, values = "rows x columns such as 2x2, each at least 1", "1x2 2x2 ..."

    def read(self, value: Any) -> tuple[int, int]:
        rows, columns = str(value).split("x")
        return int(rows), int(columns)

    def check(self, value: Any) -> bool:
        return bool(min(value) >= 1)

    def write(self, value: Any) -> str:
        return f"{value[0]}x{value[1]}"


class LayersKey(KeyType):
    """Names of layers, written with `+` between them; `measured`; or `auto`, which is no name."""

    rule, values = "auto, measured, or names of layers with + between them", "auto, measured, a+b"

    def read(self, value: Any) -> tuple[str, ...]:
        names = tuple(value.split("+")) if isinstance(value, str) else tuple(map(str, value))
        return () if names == ("auto",) else names

    def check(self, value: Any) -> bool:
        return len(value) < 2 or {"auto", *MEASURED}.isdisjoint(value)

    def write(self, value: Any) -> list[str]:
        return list(value)


class PatternKey(KeyType):
    """Text that matches a regular expression; `least` are the smallest numbers of words that have one."""

    def __init__(self, pattern: str, *forms: str, least: Mapping[str, int] | None = None) -> None:
        self._pattern, self.values, self._least = re.compile(pattern), " ".join(forms), least or {}
        self.rule = f"{', '.join(forms[:-1])} or {forms[-1]}"

    def read(self, value: Any) -> str:
        return str(value)

    def check(self, value: Any) -> bool:
        return self._pattern.fullmatch(value) is not None

    def rule_for(self, value: Any) -> str:
        word, _, number = str(value).partition(":")
        if word not in self._least or not number:
            return self.rule
        return f"{self.rule}; k of {word}:k is a whole number from {self._least[word]} to {MOST_STEPS}"

    def nearest(self, value: Any) -> str:
        word, _, number = str(value).partition(":")
        if word in self._least and re.fullmatch(r"-?[0-9]{1,4000}", number):
            return f"{word}:{min(max(int(number), self._least[word]), MOST_STEPS)}"
        near = get_close_matches(word, [form.partition(":")[0] for form in self.values.split()], n=1)
        return next((form for start in near for form in (start, f"{start}:0", f"{start}:1") if self.check(form)), "")


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Definition of one key of a plan, from which parsing, checks, file form and documentation follow."""

    type: KeyType
    meaning: str
    tested: tuple[object, ...] | None = ()
    """Values covered by parity tests, besides the default; None: any value is."""
    elsewhere: str = ""
    """Default reason why another tool cannot express the key; empty if every tool can."""


def plan_key(
    default: Any, type: KeyType, meaning: str, *, tested: Sequence[object] | None = (), elsewhere: str = ""
) -> Any:
    """A dataclass field with its definition."""
    key = PlanKey(type, meaning, None if tested is None else tuple(tested), elsewhere)
    return dataclasses.field(default=default, metadata={"key": key})


def keys_of(plan: Any) -> dict[str, PlanKey]:
    """The definitions of all keys of a plan class, by name, in the order of the notation."""
    return {f.name: f.metadata["key"] for f in dataclasses.fields(plan)}


def read_values(keys: Mapping[str, PlanKey], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a table, as in a file or as text; all unknown keys and refused values are reported at once."""
    values: dict[str, Any] = {}
    problems = []
    for name, value in table.items():
        if name not in keys:
            problems.append(KeyProblem(f"unknown key {name!r} in a plan", fix=nearest(name, keys)))
            continue
        try:
            values[name] = keys[name].type.read(value)
        except (ValueError, TypeError):
            problems.append(KeyProblem(f"{name}={value}", rule=f"{name} is {keys[name].type.rule}"))
    if problems:
        raise key_error(problems, where, PlanError)
    return values


def word_of(value: Any) -> str:
    """A value of the TOML form in the notation."""
    return "+".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)


def nearest_valid(plan: Any, name: str) -> str:
    """The way out of a plan's invalid value: a word that is meant, or the plan with the nearest valid value."""
    keys, kind = keys_of(plan), type(plan)
    key, value = keys[name], getattr(plan, name)
    if meant := nearest(word_of(key.type.write(value)), map(str, getattr(key.type, "choices", ()))):
        return meant
    standard = {f.name: f.default for f in dataclasses.fields(plan)}
    values = {n: getattr(plan, n) for n in keys if n != name and getattr(plan, n) != standard[n]}
    values[name] = key.type.read(key.type.nearest(value) or word_of(key.type.write(standard[name])))
    try:
        kind(**values)
    except PlanError:  # another value is invalid, too
        values = {name: values[name]}
    written = {n: word_of(k.type.write(values[n])) for n, k in keys.items() if n in values}
    return f"the nearest that works: {','.join(f'{n}={word}' for n, word in written.items())}"


def key_table(plan: Any) -> str:
    """The Markdown table of all keys, for the documentation."""
    rows = [f"| `{name}` | {key.type.values} | {key.meaning} |" for name, key in keys_of(plan).items()]
    return "\n".join(["| key | values | meaning |", "|---|---|---|", *rows])
