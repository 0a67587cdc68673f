"""How many Python functions a forward enters, other than those that watch it: each costs a GPU's host some time."""

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
WATCHING = tuple(
    str(path)
    for path in (
        Path(__file__).parent,
        *(Path(str(module.__file__)) for module in (contextlib, weakref)),
        *(_TORCH / name for name in ("overrides.py", "_ops.py", "_jit_internal.py", "compiler", "_library")),
        *(_TORCH / name for name in ("_subclasses", "utils/_python_dispatch.py")),
    )
)
"""Where the functions are from that a run without a trace does not enter."""


class Entered:
    """A count of what one thread enters."""

    def __init__(self) -> None:
        self.still = 0
        """Nothing counts while this is not 0."""
        self._count = 0
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Whoever else counts functions has to wait meanwhile."""
        stop = _by_monitoring(self._start) if sys.version_info >= (3, 12) else _by_profile(self._start)
        try:
            yield
        finally:
            stop()

    def _start(self, code: CodeType) -> None:
        if self.still or threading.get_ident() != self._thread:
            return
        if not code.co_filename.startswith(WATCHING):
            self._count += 1

    def taken(self) -> int:
        """How many since this was asked last."""
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
