"""Who sees off what nobody waits for: it leaves though the program only computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ...core.errors import DrumlineError
from .post import Outgoing

_PAUSE = 0.001
"""Seconds between two looks at what leaves."""


class Turn:
    """A lock whose holder can see that others want it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wanted: deque[None] = deque()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.wanted.append(None)
            self._lock.acquire()
            self.wanted.pop()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Porter:
    """A thread that is there while something leaves that nobody waits for."""

    def __init__(self, name: str, turn: Turn, progress: Callable[[float], None]) -> None:
        self._name, self._turn, self._progress = name, turn, progress
        self._leaving: list[Outgoing] = []
        self._thread: threading.Thread | None = None
        self.closed = False
        """Whether its rank has ended: then it looks no more."""

    @property
    def busy(self) -> bool:
        """Whether something has not left yet."""
        return any(not out.done for out in self._leaving)

    def take(self, out: Outgoing) -> None:
        """See this off, too. Called by who has the turn."""
        self._leaving.append(out)
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name=self._name, daemon=True)
            self._thread.start()

    def _carry(self) -> None:
        while True:
            time.sleep(_PAUSE)
            with self._turn:
                self._leaving = [one for one in self._leaving if not one.done]
                if not self._leaving or self.closed:
                    self._thread = None
                    return
                try:
                    self._progress(0.0)
                except DrumlineError:  # whoever waits next is told
                    self._thread = None
                    return
