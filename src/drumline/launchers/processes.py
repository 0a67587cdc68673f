"""Processes that `run`, `launch` and ssh start on this machine: when one fails the others are ended, by their ids."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hang_watch import HangWatch

GRACE = 5.0
"""Seconds that a process may take to end by itself."""
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes succeed or one fails; the exit code. TERM and USR1 are passed on to all of them."""
    try:
        with forwarding_signals(processes):
            return first_failure(processes)[0]
    finally:
        end_all(processes)


def first_failure(processes: Sequence[subprocess.Popen[bytes]], watch: HangWatch | None = None) -> tuple[int, int]:
    """(exit code, number) of the first process that fails; (0, 0) when all have succeeded. A `watch` raises a hang."""
    while True:
        if watch is not None and (report := watch.check()):
            raise watch.failure(report)
        codes = [p.poll() for p in processes]
        for number, code in enumerate(codes):
            if code:
                return code, number
        if all(code == 0 for code in codes):
            return 0, 0
        time.sleep(0.05)


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: TERM first, KILL after a while."""
    for p in processes:
        if p.poll() is None:
            p.terminate()
    end = time.monotonic() + GRACE
    for p in processes:
        try:
            p.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()
        with contextlib.suppress(OSError):  # what a process that leads a group has started
            os.killpg(p.pid, signal.SIGKILL)


@contextmanager
def forwarding_signals(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass signals on inside the block: a scheduler may send them to this process alone. A second one ends all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    seen: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt(signal.Signals(number).name)
        for p in processes:
            if p.poll() is None:
                p.send_signal(number)

    before = {s: signal.signal(s, forward) for s in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
