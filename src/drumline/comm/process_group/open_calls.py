"""Calls of one rank of one group that are in progress, and the last ones that have ended.

A call that blocks is noted before it starts. An asynchronous one is noted in a queue once it has started, and taken out
by the next call outside of a backward, or a few times a second by a thread: a callback of each would tell at once, but
takes 50 us of a processor. Calls leave the queue in their order, so one that ends before an earlier one leaves later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..call_check import CallSignature, CallSite

_KEPT = 1024
"""Calls that have ended here and about which this rank can still be asked: the root of a broadcast may be far ahead."""

AsynchronousCall = tuple[int, CallSignature, CallSite, int, Callable[[], bool], Callable[[], None] | None]
"""Number, signature, line, start by `time.perf_counter_ns`, whether it has ended, and what to call then."""


class OpenCalls:
    """The calls in progress, however many."""

    def __init__(self) -> None:
        self.asynchronous: deque[AsynchronousCall] = deque()
        """Oldest first. The caller appends to it directly: it does so for every bucket of every step."""
        self._blocking: dict[int, tuple[CallSignature, CallSite, int]] = {}
        self._ended: deque[tuple[Any, ...]] = deque(maxlen=_KEPT)
        """The last calls that have ended: number, signature, line, and more."""
        self._sweeping = threading.Lock()

    def begin(self, number: int, signature: CallSignature, site: CallSite) -> None:
        """A call is about to start, and this rank waits in it."""
        self._blocking[number] = signature, site, time.perf_counter_ns()

    def end(self, number: int) -> None:
        """The call has ended, if this rank waited in it."""
        call = self._blocking.pop(number, None)
        if call is not None:
            self._ended.append((number, *call))

    def go_on(self, number: int, has_ended: Callable[[], bool], end: Callable[[], None] | None) -> None:
        """The call has started, and this rank does not wait in it any more."""
        signature, site, since = self._blocking[number]
        self.asynchronous.append((number, signature, site, since, has_ended, end))
        del self._blocking[number]

    def sweep(self, *, everything: bool = False) -> int:
        """Take out the asynchronous calls that have ended; their number."""
        calls, ended = self.asynchronous, 0
        with self._sweeping:
            while calls and (everything or calls[0][4]()):
                call = calls.popleft()
                # without what tells its end: that holds tensors
                self._ended.append(call[:4])
                if call[5] is not None:
                    call[5]()
                ended += 1
        return ended

    def last(self) -> tuple[int, CallSignature, CallSite] | None:
        """The last call that was started and not waited for, or has ended."""
        for calls in (self.asynchronous, self._ended):
            with contextlib.suppress(IndexError):  # another thread has just taken out the only one
                return calls[-1][:3]
        return None

    def waits(self) -> dict[int, tuple[CallSignature, CallSite, int]]:
        """The calls in progress by number, with their start."""
        waits = dict(self._blocking)
        waits |= {number: (signature, site, since) for number, signature, site, since, *_ in self.asynchronous.copy()}
        return waits

    def ended(self) -> Iterable[tuple[int, CallSignature, CallSite]]:
        """The last calls that have ended."""
        calls: Iterator[tuple[Any, ...]] = iter(self._ended.copy())
        return ((call[0], call[1], call[2]) for call in calls)
