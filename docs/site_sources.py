"""Complete Markdown pages for the site: a table of contents from links, an API reference from docstrings."""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from types import GenericAlias, ModuleType
from typing import Any

API_BLOCK = re.compile(r"<!-- api: ([\w.]+) -->\n(.*?)<!-- /api -->", re.S)
"""A table of public names on docs/api.md; the site shows their docstrings instead."""
_FENCE = re.compile(r"```.*?```", re.S)
_LINK = re.compile(r"\]\(([\w./-]+)\.md(?:#[\w-]+)?\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[\w./-]+\.md)\)")
_LIST_ITEM = re.compile(r"([-*]|\d+\.)\s")


def complete_page(app: Any, docname: str, source: list[str]) -> None:
    """Called for each page when it is read."""
    if posixpath.basename(docname) == "index":
        source[0] += contents(source[0], captions=docname == "index")
    source[0] = _OUTSIDE.sub(lambda m: m[0] if _is_inside(docname, m[2]) else f"{m[1]} (`{m[2]}`)", source[0])
    source[0] = API_BLOCK.sub(lambda block: directives(block[1]), source[0])


def _is_inside(docname: str, target: str) -> bool:
    """Whether a link of a page leads to another page; the README and the changelog are files of the repository."""
    return not posixpath.normpath(posixpath.join(posixpath.dirname(docname), target)).startswith("..")


def contents(text: str, captions: bool) -> str:
    """Hidden tables of contents: one per section of an index page, its entries in the order of their first links."""
    seen: set[str] = set()
    tables = []
    for section in re.split(r"^## ", _FENCE.sub("", text), flags=re.M):
        caption, _, body = section.partition("\n")
        pages = [p for p in dict.fromkeys(_LINK.findall(body)) if not p.startswith("..") and p not in seen]
        seen.update(pages)
        if pages:
            head = f":caption: {caption}\n" if captions and not caption.startswith("#") else ""
            tables.append(f"\n```{{toctree}}\n:hidden:\n{head}\n" + "\n".join(pages) + "\n```\n")
    return "".join(tables)


# -- the API reference


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module exports: its `__all__`, or else the public functions and classes that it defines."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = [n for n in names if not n.startswith("_") and callable(getattr(module, n))]
    for name in names:
        yield name, getattr(module, name)


def documented_names(module: ModuleType) -> list[tuple[str, Any]]:
    """The public names of a module that have their entry there: those of `drumline` itself are not repeated."""
    import drumline

    top = () if module is drumline else {id(getattr(drumline, name)) for name in drumline.__all__}
    return [(name, value) for name, value in public_names(module) if id(value) not in top]


def api_table(module: ModuleType) -> str:
    """The names of a module with the first sentence of each docstring, as a Markdown table."""
    rows = [f"| `{name}` | {first_sentence(value)} |" for name, value in documented_names(module)]
    return "\n".join(["| name | |", "|---|---|", *rows, ""])


def _is_constant(value: Any) -> bool:
    return not (inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value))


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring; empty if there is none."""
    if isinstance(value, GenericAlias):
        return "a type alias"
    if _is_constant(value):
        return f"a constant ({type(value).__name__})"
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    if inspect.isclass(value) and text.startswith(f"{value.__name__}("):  # written by `dataclass`
        return ""
    end = re.search(r"\.(?=\s+[A-Z`])", text)
    return text[: end.end()].replace("|", "\\|") if end else text.replace("|", "\\|")


def directives(module_name: str) -> str:
    """Autodoc directives for the public names of a module."""
    import importlib

    module = importlib.import_module(module_name)
    blocks = []
    for name, value in documented_names(module):
        if _is_constant(value) or inspect.ismodule(value):
            kind = "data" if _is_constant(value) else "module"
            text = first_sentence(value).replace("`", "``")
            head = f".. py:{kind}:: {name}\n   :module: {module_name}\n"
            if kind == "module":  # what follows does not belong to it
                head = f".. py:module:: {module_name}.{name}\n\n.. py:currentmodule:: None\n"
                text = text.strip() and f"``{name}``: {text}"
            blocks.append(f"{head}\n{'   ' if kind == 'data' else ''}{text}\n")
            continue
        kind = "autoclass" if inspect.isclass(value) else "autofunction"
        if inspect.isclass(value) and issubclass(value, BaseException):
            kind = "autoexception"
        members = "\n   :members:" if inspect.isclass(value) else ""
        blocks.append(f".. {kind}:: {module_name}.{name}{members}\n")
    return "```{eval-rst}\n" + "\n".join(blocks) + "```\n"


def docstring_to_rst(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code` in backticks; make reStructuredText of it, in place."""
    out: list[str] = []
    literal = False
    for line in lines:
        indented = line.startswith("    ") and (not out or not out[-1] or literal)
        if indented and not literal:
            out += ["::", ""]
        if line.strip():
            literal = indented
        out.append(line if literal else _escaped(line, out))
    lines[:] = out


def _escaped(line: str, before: list[str]) -> str:
    """One line of prose: code in double backticks, everything else as written."""
    text = line.strip()
    item = _LIST_ITEM.match(text)
    head = f"{item[1]} " if item else ""
    body = text[item.end() :] if item else text
    parts = body.split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner is a character
        parts = [body]
    escaped = [re.sub(r"([\\*_|`])", r"\\\1", part) if i % 2 == 0 else f"``{part}``" for i, part in enumerate(parts)]
    starts_list = item and before and before[-1].strip() and not _LIST_ITEM.match(before[-1].strip())
    indent = "  " if not item and _in_list(before) else ""
    return ("\n" if starts_list else "") + indent + head + "\\ ".join(p for p in escaped if p).replace("\\ \\ ", "\\ ")


def _in_list(before: list[str]) -> bool:
    for line in reversed(before):
        if not line.strip():
            return False
        if _LIST_ITEM.match(line.strip()):
            return True
    return False
