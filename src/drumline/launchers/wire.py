"""Values between ranks as JSON text: numbers, texts, lists, tuples, tables, paths, and dataclasses of this package.

Nothing is unpickled. A dataclass is named by its module and class, both inside this package, and built by its fields.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

from ..core.errors import CorruptFile, InputError

_PACKAGE = __name__.partition(".")[0]
_TYPE, _FIELDS, _TUPLE, _TABLE, _PATH = "$type", "$fields", "$tuple", "$table", "$path"


def encode(value: Any) -> str:
    """A value as text."""
    return json.dumps(_to_json(value))


def decode(text: str | bytes) -> Any:
    """The value of a text; refuse what `encode` does not write."""
    try:
        return _from_json(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as e:
        raise CorruptFile("a message between ranks is damaged", rule=f"{type(e).__name__}: {e}") from None


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return {_PATH: str(value)}
    if isinstance(value, list):
        return [_to_json(v) for v in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(v) for v in value]}
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _to_json(v) for k, v in value.items()}
        return {_TABLE: [[_to_json(k), _to_json(v)] for k, v in value.items()]}
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith(f"{_PACKAGE}."):
        fields = {f.name: _to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {_TYPE: f"{type(value).__module__}:{type(value).__qualname__}", _FIELDS: fields}
    raise InputError(
        f"a {type(value).__name__} cannot be sent to ranks of another launcher",
        rule="numbers, texts, lists, tables and Drumline's own values are sent as JSON",
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    if _TYPE in value:
        return _class(value[_TYPE])(**{k: _from_json(v) for k, v in value[_FIELDS].items()})
    if _TUPLE in value:
        return tuple(_from_json(v) for v in value[_TUPLE])
    if _TABLE in value:
        return {_from_json(k): _from_json(v) for k, v in value[_TABLE]}
    if _PATH in value:
        return Path(value[_PATH])
    return {k: _from_json(v) for k, v in value.items()}


def _class(name: str) -> Any:
    """The dataclass of a name, of this package only."""
    module, _, cls = name.partition(":")
    if not module.startswith(f"{_PACKAGE}.") or not cls.isidentifier():
        raise ValueError(f"{name!r} is not of this package")
    loaded = getattr(importlib.import_module(module), cls)
    if not (isinstance(loaded, type) and dataclasses.is_dataclass(loaded) and loaded.__module__ == module):
        raise ValueError(f"{name!r} is not a dataclass")
    return loaded
