"""The functions that are sent to ranks: by name where a rank can import them, by value where it cannot.

A rank is a fresh process. It imports the functions of modules and of scripts that guard their calls. Functions of a
notebook, of a prompt or of a script without a guard, lambdas and local functions are sent as code, with the variables
that they use (cloudpickle). Only a rank reads what its own launcher has sent, through a pipe that no one else can open.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ..core.errors import InputError

Lines = Mapping[str, list[str]]
"""Source lines by the name of the cell that they are from."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A function and its arguments as bytes, for ranks."""

    data: bytes
    needs_main: bool = False
    """Whether the rank must import the main script first, as `multiprocessing` does."""
    sources: Lines | None = None
    """Texts of cells, so that a traceback of a rank shows their lines."""

    def load(self) -> Any:
        """The value, in a rank."""
        for name, lines in (self.sources or {}).items():
            linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
        return pickle.loads(self.data)  # noqa: S301  # from the process that started this one


def pack(value: Any) -> Payload:
    """The form in which ranks get a value; refuse one that cannot be sent, and name the part that cannot."""
    try:
        data = pickle.dumps(value)
    except Exception:  # a lambda, or a local function
        data = b""
    if data and b"__main__" not in data:
        return Payload(data)
    if data and main_can_be_imported():
        return Payload(data, needs_main=True)
    import cloudpickle  # type: ignore[import-untyped]  # has no annotations

    try:
        return Payload(cloudpickle.dumps(value), sources=_sources_of_cells())
    except Exception as e:
        raise InputError(
            f"{_unsendable(value)} cannot be sent to ranks: {e}",
            rule="functions of a notebook or script are sent with the variables that they use",
            fix="make it inside the function, or import it from a module",
        ) from None


def dumps_result(value: Any) -> bytes:
    """A rank's result: also of classes that were sent by value."""
    try:
        return pickle.dumps(value)
    except Exception:
        import cloudpickle

        data: bytes = cloudpickle.dumps(value)
        return data


def main_can_be_imported() -> bool:
    """Whether a rank can import the main script without running again the line that runs now."""
    main = sys.modules["__main__"]
    path = Path(getattr(main, "__file__", None) or "")
    if path.suffix != ".py" or not path.is_file():
        return False
    line = _line_of_main(main.__dict__)
    return line is None or _is_guarded(path, line)


def _line_of_main(namespace: dict[str, object]) -> int | None:
    """The line of the script's top level that runs now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is namespace:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_guarded(path: Path, line: int) -> bool:
    """Whether a line of a script is inside a top-level `if __name__ == ...`."""
    try:
        body = ast.parse(path.read_bytes()).body
    except SyntaxError:
        return False
    return any(
        isinstance(node, ast.If)
        and "__name__" in ast.unparse(node.test)
        and node.lineno <= line <= (node.end_lineno or 0)
        for node in body
    )


def _sources_of_cells() -> Lines:
    """Texts that only this process has: of cells and prompts."""
    entries = {name: entry[2] for name, entry in list(linecache.cache.items()) if len(entry) == 4}
    return {name: lines for name, lines in entries.items() if not Path(name).is_file()}


def _unsendable(value: Any) -> str:
    """The part of a value that cannot be sent, in words: a field of a job, or a variable that a function uses."""
    parts = list(value) if isinstance(value, tuple) else [value]
    parts += [item for part in parts if isinstance(part, tuple) for item in part]
    for part in parts:
        for name, item in _named_parts(part):
            if not _sendable(item):
                inner = next((f"{n} of " for n, used in _named_parts(item) if not _sendable(used)), "")
                return f"{inner}{name}"
    return "the function or its arguments"


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    if is_dataclass(value) and not isinstance(value, type):
        return [(f"{type(value).__name__}.{f.name}", getattr(value, f.name)) for f in fields(value)]
    if inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        return [(f"the variable {name!r}", item) for name, item in {**used.globals, **used.nonlocals}.items()]
    return []


def _sendable(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
