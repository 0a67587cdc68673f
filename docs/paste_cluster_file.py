"""Write the tables of keys in cluster-file.md anew, from the dataclasses that read the file.

python docs/paste_cluster_file.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from drumline.clusters import Cluster

PAGE = Path(__file__).with_name("cluster-file.md")
BLOCK = re.compile(r"<!-- keys -->\n.*?<!-- /keys -->", re.S)
VALUES = {
    "Bytes": 'bytes, or `"80GB"`',
    "Bandwidth": 'bytes per second, or `"300GB/s"`',
    "Flops": 'operations per second, or `"312TFLOP/s"`',
    "Seconds": 'seconds, or `"3us"`',
    "Count": "a whole number from 1",
    "_Kernel": "a word",
    "str": "text",
    "bool": "true, false",
}
"""Values of a key by the name of its type."""


def tables() -> list[tuple[str, type]]:
    """Every table of the file with its dataclass, each dataclass once: at its shortest path."""
    places: dict[type, str] = {Cluster: ""}
    waiting: list[type] = [Cluster]
    while waiting:
        kind = waiting.pop(0)
        for f in dataclasses.fields(kind):
            hint = get_type_hints(kind)[f.name]
            inner = _inner(hint)
            if inner and inner not in places:
                numbered = ".N" if get_origin(hint) is dict else ""
                places[inner] = f"{places[kind]}.{f.name}{numbered}".lstrip(".")
                waiting.append(inner)
    top = ["", *(f.name for f in dataclasses.fields(Cluster))]
    return sorted(((path, kind) for kind, path in places.items()), key=lambda item: top.index(item[0].split(".")[0]))


def _inner(hint: Any) -> type | None:
    """The dataclass of a nested table: `X`, `X | None`, `tuple[X, ...]`, `dict[str, X]`."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint
    if get_origin(hint) in (tuple, dict, UnionType) or hasattr(hint, "__metadata__"):
        return next((inner for a in get_args(hint) if (inner := _inner(a))), None)
    return None


def field_texts(kind: type) -> dict[str, tuple[str, str]]:
    """Annotation and docstring of every field, from the source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    texts = {}
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = " ".join(str(following.value.value).split()) if is_text else ""  # type: ignore[union-attr]
            texts[node.target.id] = (ast.unparse(node.annotation), text)
    return texts


def keys_of_the_file() -> str:
    """All tables of the page."""
    blocks = []
    places = {kind: path for path, kind in tables()}
    for path, kind in tables():
        hints, texts = get_type_hints(kind), field_texts(kind)
        rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
        for f in dataclasses.fields(kind):
            annotation, text = texts[f.name]
            inner = _inner(hints[f.name])
            if inner:
                text = text or f"see `{places[inner]}`"
            cells = (f"`{f.name}`", _value(annotation, inner, places), _default(f), text.replace("|", "\\|"))
            rows.append(f"| {' | '.join(cells)} |")
        title = f"### `[{path}]`" if path else "### At the top"
        if path and get_origin(get_type_hints(_owner(path)).get(path.split(".")[-1])) is tuple:
            title = f"### `[[{path}]]`"
        summary = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        blocks += [title, "", summary, "", *rows, ""]
    return "\n".join(blocks)


def _owner(path: str) -> type:
    parent = ".".join(part for part in path.split(".")[:-1])
    return next((kind for place, kind in tables() if place == parent), Cluster)


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
        return "required"
    value = f.default if f.default is not dataclasses.MISSING else None
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value not in (None, "", ()) else "empty"


def _value(annotation: str, inner: type | None, places: dict[type, str]) -> str:
    """What a key takes, in words; an annotation that has none here is an error."""
    if inner:
        many = (
            "tables"
            if annotation.startswith("tuple")
            else "a table for each number of ranks"
            if "dict" in annotation
            else "a table"
        )
        return f"{many}: `{places[inner]}`"
    if annotation in VALUES:
        return VALUES[annotation]
    if annotation.startswith("Literal["):
        return ", ".join(f"`{word}`" for word in re.findall(r"'(\w+)'", annotation))
    if "dict[str, " in annotation:
        item = re.search(r"dict\[str, (\w+)", annotation)
        assert item
        return "a table of " + {
            "Flops": "operations per second by precision",
            "Seconds": "seconds by name",
            "str": "texts by key",
        }.get(item[1], "numbers by name")
    if "parse_bytes" in annotation:
        return VALUES["Bytes"]
    if "parse_shape" in annotation:
        return '`[4, 8]` or `"4x8"`'
    if "known_topology" in annotation:
        return "a word"
    if annotation.startswith("tuple["):
        return "a list of lists of numbers" if "tuple[tuple" in annotation else "a list of numbers"
    bounds = dict(re.findall(r"(ge|gt|le)=([\w. /*]+?)(?=[,)])", annotation))
    if annotation.startswith(("Annotated[float", "Annotated[int")):
        low = f"from {bounds['ge']}" if "ge" in bounds else f"above {bounds['gt']}" if "gt" in bounds else ""
        kind = "a whole number" if "[int" in annotation else "a number"
        return f"{kind} {low}".strip()
    raise ValueError(f"no words for the type {annotation}")


def pasted(text: str) -> str:
    """The page with the tables that the dataclasses make."""
    return BLOCK.sub(lambda _: f"<!-- keys -->\n{keys_of_the_file()}<!-- /keys -->", text)


if __name__ == "__main__":
    PAGE.write_text(pasted(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
