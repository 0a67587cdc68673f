"""TERM and USR1 on a rank of another launcher, outside of its training.

A training handles them itself: it finishes the step, saves, and ends with exit code 0. Before its first step there is
nothing to save, so a rank that waits, plans or measures ends at once, also with exit code 0, and so do the others; a
rank that sets the training up already leaves the signal to it. Other verbs have no result then, so they end with
128 + the number of the signal. After the training a late signal asks for what was done already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from ..comm.rank_status import rank_status

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class PreemptedEarly(SystemExit):
    """The job was asked to stop before its training began: it ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class EarlySignalHandler:
    """Handles the signals while a verb runs. The training takes over: it looks at `asked` when it begins."""

    def __init__(self, *, trains: bool, sets_up: Callable[[], bool]) -> None:
        self._trains, self._sets_up = trains, sets_up
        self.asked = False
        """Whether the training is to stop after its first step."""

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Handle one signal; a second one ends the process."""
        if rank_status().read().place != "starting":
            return
        if not self._trains:
            raise SystemExit(128 + number)
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = True
        if not self._sets_up():
            raise PreemptedEarly


@contextlib.contextmanager
def handling_early_signals(*, trains: bool, sets_up: Callable[[], bool]) -> Iterator[None]:
    """Handle TERM and USR1 inside the block, on the main thread; `sets_up`: whether the training is being set up.

    Masks would not do: torch has started threads that have none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = EarlySignalHandler(trains=trains, sets_up=sets_up)
    before = {s: signal.signal(s, handler) for s in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
