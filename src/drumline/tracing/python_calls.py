"""Counts the Python functions that a forward enters: each costs the host of a GPU some time."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_TORCH = Path(torch.__file__).parent
EXCLUDED = tuple(
    str(path)
    for path in (
        Path(__file__).parent,
        *(Path(str(module.__file__)) for module in (contextlib, weakref)),
        *(_TORCH / name for name in ("overrides.py", "_ops.py", "_jit_internal.py", "compiler", "_library")),
        *(_TORCH / name for name in ("_subclasses", "utils/_python_dispatch.py")),
    )
)
"""Files of functions that only a trace enters."""


class PythonCallCounter:
    """Counts the functions that one thread enters."""

    def __init__(self) -> None:
        self.paused = 0
        """Counting is paused while this is not 0."""
        self._count = 0
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside. Another profiler of Python functions is suspended meanwhile."""
        stop = _by_monitoring(self._start) if sys.version_info >= (3, 12) else _by_profile(self._start)
        try:
            yield
        finally:
            stop()

    def _start(self, code: CodeType) -> None:
        if self.paused or threading.get_ident() != self._thread:
            return
        if not code.co_filename.startswith(EXCLUDED):
            self._count += 1

    def take_count(self) -> int:
        """The count since the last call."""
        count, self._count = self._count, 0
        return count


def _by_profile(start: Callable[[CodeType], None]) -> Callable[[], None]:
    before = sys.getprofile()

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            start(frame.f_code)

    sys.setprofile(seen)
    return lambda: sys.setprofile(before)


def _by_monitoring(start: Callable[[CodeType], None]) -> Callable[[], None]:
    watch: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # since Python 3.12
    tool = next((i for i in range(6) if watch.get_tool(i) is None), None)
    if tool is None:
        return lambda: None

    def seen(code: CodeType, _: int) -> None:
        start(code)

    watch.use_tool_id(tool, "drumline")
    watch.register_callback(tool, watch.events.PY_START, seen)
    watch.set_events(tool, watch.events.PY_START)

    def stop() -> None:
        watch.set_events(tool, 0)
        watch.free_tool_id(tool)

    return stop
