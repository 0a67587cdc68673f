"""The imports of the package's source files, read without importing them."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "drumline"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, at the start of a file, inside a function, or for type checking."""

    module: str
    """Absolute: `drumline.core.errors`, `torch.nn`."""
    typing_only: bool
    line: int


def files(source: Path = SOURCE) -> list[Path]:
    """All modules of the package."""
    return sorted(source.rglob("*.py"))


@functools.cache
def syntax(text: str) -> ast.Module:
    """The syntax of a file, parsed once: several rules look at every file. None may change it."""
    return ast.parse(text)


def module_name(path: Path, source: Path = SOURCE) -> str:
    """`drumline.comm.shm` of comm/shm/__init__.py."""
    return ".".join(["drumline", *path.relative_to(source).with_suffix("").parts]).removesuffix(".__init__")


def imports(path: Path, source: Path = SOURCE) -> list[Import]:
    """Every import in a file. `from package import name` gives package.name if that is a module of ours."""
    return _imports(path.read_text(), path, source)


@functools.cache
def _imports(text: str, path: Path, source: Path) -> list[Import]:
    """Read once as long as the text is the same: several rules look at every file."""
    package = ["drumline", *path.relative_to(source).parent.parts]
    kinds = (ast.Import, ast.ImportFrom, *([ast.If] if "TYPE_CHECKING" in text else []))
    nodes = [node for node in ast.walk(syntax(text)) if isinstance(node, kinds)]
    typing_only = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    result = []
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            names = [n if _exists(n := f"{module}.{alias.name}", source) else module for alias in node.names]
        result += [Import(name, id(node) in typing_only, node.lineno) for name in dict.fromkeys(names)]
    return result


def _exists(module: str, source: Path) -> bool:
    path = source.joinpath(*module.split(".")[1:])
    return module.startswith("drumline.") and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def mutual_imports(source: Path = SOURCE) -> dict[str, list[str]]:
    """Pairs of packages that import each other, at every level, with the imports of both.

    Under each package its sub-packages are compared with each other and with the package's own modules. A package's
    `__init__` may import what is inside the package.
    """
    edges: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for path in files(source):
        importer = module_name(path, source).split(".")
        inside = importer if path.name == "__init__.py" else importer[:-1]
        for item in imports(path, source):
            target = item.module.split(".")
            if target[0] != "drumline" or (path.name == "__init__.py" and target[: len(importer)] == importer):
                continue
            package = _package(item.module, source)
            depth = next((i for i, (a, b) in enumerate(zip(inside, package, strict=False)) if a != b), None)
            depth = min(len(inside), len(package)) if depth is None else depth
            one, other = _unit(importer, inside, depth), _unit(target, package, depth)
            if one != other:
                where = f"{path.relative_to(source)}:{item.line} imports {item.module}"
                edges[".".join(inside[:depth]), one, other].append(where)
    return {
        f"{a} <-> {b} in {parent}": [*places, *edges[parent, b, a]]
        for (parent, a, b), places in edges.items()
        if a < b and (parent, b, a) in edges
    }


def _package(module: str, source: Path) -> list[str]:
    """The package that a module of ours is in, as a list of names; a package is in itself."""
    parts = module.split(".")
    return parts if source.joinpath(*parts[1:]).is_dir() else parts[:-1]


def _unit(module: list[str], package: list[str], depth: int) -> str:
    """Map a module to its unit under the package of `depth` names: a sub-package, or one of its own modules.

    Directly under `drumline` every module is a room of its own.
    """
    if len(package) > depth:
        return ".".join(package[: depth + 1])
    return ".".join(module) if depth == 1 else "its own modules"
