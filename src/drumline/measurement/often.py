"""Something that is done again and again, amid a measurement that takes long."""

from __future__ import annotations

import time
from collections.abc import Callable


class Often:
    """Calls an action, but not more often than every so many seconds."""

    def __init__(self, action: Callable[[], None], gap: float) -> None:
        self._action, self._gap = action, gap
        self._calls, self._last = 0, time.monotonic()

    def __call__(self) -> None:
        """If it is time again."""
        if time.monotonic() - self._last >= self._gap:
            self._call()

    def fill(self, least: int) -> None:
        """Up to so many calls in all."""
        while self._calls < least:
            self._call()

    def _call(self) -> None:
        self._action()
        self._calls, self._last = self._calls + 1, time.monotonic()
