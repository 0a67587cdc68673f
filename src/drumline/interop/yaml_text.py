"""YAML of configs, read with ruamel.yaml's parser and written with its emitter.

Configs are tables, lists and single values on one line. Anchors, aliases, tags, multi-line text and several documents
are refused with the line, and so are values that YAML 1.1 and 1.2 readers take for different things.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 20
_DIRECTIVES = "directives are not supported"
_Event = Any
"""An event of ruamel.yaml's parser; their base class declares no attributes."""
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?")
_AMBIGUOUS = re.compile(r"[-+]?0[0-9xob_]+[0-9a-fA-F_]*|[-+]?[0-9]+(:[0-5]?[0-9])+|[-+]?\.(inf|nan)", re.I)


def parse(text: str) -> Any:
    """The document. Raises ValueError with the line."""
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return _Builder(_yaml().parse(io.StringIO(text))).document()
    except _UnsupportedYaml as e:
        line, rule = e.line, e.rule
        if rule == _DIRECTIVES:  # the parser marks the document, not the directive
            line = next(i for i, text_line in enumerate(text.splitlines()) if text_line.startswith("%"))
    except MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line, rule = mark.line if mark else 0, str(e.problem or e.context)
        rule = "tabs are not indentation" if "'\\t'" in rule else rule
    except YAMLError as e:
        line, rule = 0, str(e).splitlines()[0]
    except RecursionError:
        line, rule = 0, "nested too deeply"
    raise ValueError(f"line {line + 1}: {rule}, at {[*text.splitlines(), ''][line].strip()[:40]!r}")


def write(table: Mapping[str, Any]) -> str:
    """The text of a table, which readers of YAML 1.1 and 1.2 understand in the same way."""
    yaml, out = _yaml(), io.StringIO()
    yaml.version, yaml.default_flow_style, yaml.width = (1, 1), False, 2**20
    yaml.allow_unicode, yaml.sort_base_mapping_type_on_output = True, False
    yaml.dump(dict(table), out)
    return out.getvalue().removeprefix("%YAML 1.1\n---").lstrip("\n ")


def _yaml() -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True)


class _UnsupportedYaml(Exception):
    def __init__(self, event: _Event, rule: str, offset: int = 0) -> None:
        self.line, self.rule = event.start_mark.line + offset, rule


class _Builder:
    """Builds the value from the parser's events, so that nothing is constructed before it is checked."""

    def __init__(self, events: Iterator[_Event]) -> None:
        self._events = events

    def document(self) -> Any:
        value = None
        documents = 0
        for event in self._events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    raise _UnsupportedYaml(event, "a config is one document")
                if event.version or event.tags:
                    raise _UnsupportedYaml(event, _DIRECTIVES)
            elif kind == "DocumentEndEvent" and event.explicit:
                raise _UnsupportedYaml(event, "a config is one document")
            elif kind not in ("StreamStartEvent", "StreamEndEvent", "DocumentEndEvent"):
                value = self._value(event, 0)
                if isinstance(value, str):
                    raise _UnsupportedYaml(event, "a config is lines of `key: value`, or of `- value`")
        return value

    def _value(self, event: _Event, depth: int) -> Any:
        if type(event).__name__ == "AliasEvent" or event.anchor or event.tag:
            raise _UnsupportedYaml(event, "anchors, aliases and tags are not supported")
        if depth > MAX_DEPTH:
            raise _UnsupportedYaml(event, "nested too deeply")
        kind = type(event).__name__
        if kind == "MappingStartEvent":
            return self._table(event, depth)
        if kind == "SequenceStartEvent":
            return self._list(event, depth)
        return _scalar(event)

    def _table(self, start: _Event, depth: int) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for event in self._until("MappingEndEvent"):
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                raise _UnsupportedYaml(event, "a key that is not a plain word needs quotes")
            if key in table:
                raise _UnsupportedYaml(event, f"the key {key!r} is given twice")
            value = next(self._events)
            if start.flow_style and getattr(value, "value", None) == "" and not value.style:
                raise _UnsupportedYaml(event, "a table is {key: value, key: value}")
            table[key] = self._value(value, depth + 1)
        return table

    def _list(self, start: _Event, depth: int) -> list[Any]:
        items = []
        for event in self._until("SequenceEndEvent"):
            if not start.flow_style and type(event).__name__.endswith("StartEvent") and not event.flow_style:
                raise _UnsupportedYaml(event, "items of a list are single values here")
            if start.flow_style and getattr(event, "value", "").endswith(":") and not event.style:
                rule = f"{event.value} can be read as a word or as a key: write it in quotes"
                raise _UnsupportedYaml(event, rule)
            items.append(self._value(event, depth + 1))
        return items

    def _until(self, end: str) -> Iterator[_Event]:
        for event in self._events:
            if type(event).__name__ == end:
                return
            yield event


def _scalar(event: _Event) -> Any:
    """A string, a number, true or false, or None."""
    text = event.value
    if event.style in ("|", ">"):
        raise _UnsupportedYaml(event, "multi-line text is not supported")
    if event.start_mark.line != event.end_mark.line:
        raise _UnsupportedYaml(event, "a value is one line, and a table has its own key", offset=1)
    if event.style in ("'", '"'):
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        number = float(text.replace("_", ""))
        if not math.isfinite(number):
            raise _UnsupportedYaml(event, f"{text} is not a finite number")
        return number
    if _AMBIGUOUS.fullmatch(text):
        raise _UnsupportedYaml(
            event, f"{text} can be read as a number or as a word: write it in decimals, or in quotes"
        )
    return text
