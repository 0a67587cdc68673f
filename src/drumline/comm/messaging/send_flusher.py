"""A background thread that flushes sends no rank waits on, so that they complete while the program computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ...core.errors import DrumlineError
from .endpoint import OutgoingFrame

_INTERVAL = 0.001
"""Seconds between two attempts."""


class ProgressLock:
    """A lock whose owner can see that other threads want it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waiters: deque[None] = deque()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waiters.append(None)
            self._lock.acquire()
            self.waiters.pop()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class SendFlusher:
    """A thread that exists while there are unfinished sends."""

    def __init__(self, name: str, lock: ProgressLock, progress: Callable[[float], None]) -> None:
        self._name, self._lock, self._progress = name, lock, progress
        self._frames: list[OutgoingFrame] = []
        self._thread: threading.Thread | None = None
        self.closed = False
        """Whether its rank has ended; then the thread stops."""

    @property
    def busy(self) -> bool:
        """Whether a send is unfinished."""
        return any(not frame.done for frame in self._frames)

    def add(self, frame: OutgoingFrame) -> None:
        """Flush this frame, too. The caller has the lock."""
        self._frames.append(frame)
        if self._thread is None:
            self._thread = threading.Thread(target=self._flush, name=self._name, daemon=True)
            self._thread.start()

    def _flush(self) -> None:
        while True:
            time.sleep(_INTERVAL)
            with self._lock:
                self._frames = [frame for frame in self._frames if not frame.done]
                if not self._frames or self.closed:
                    self._thread = None
                    return
                try:
                    self._progress(0.0)
                except DrumlineError:  # raised again in the next thread that waits
                    self._thread = None
                    return
