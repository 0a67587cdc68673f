"""Why ranks ended, and which of them ended first: the others fail because it is gone."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..comm.peer_errors import is_follow_up
from ..core.errors import DrumlineError, RankFailed

_NO_MEMORY = ("MemoryError", "can't allocate memory", "out of memory", "Cannot allocate memory")
"""Parts of the errors that a rank raises when memory runs out."""
_SEEN_LATE = 0.2
"""Seconds by which the end of a killed rank may be seen later than the errors of its peers."""
_LINES = 40
"""Lines of a traceback that are shown at most."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank failed."""

    rank: int
    when: float
    """By `time.monotonic`, which all processes of a machine share."""
    error: DrumlineError
    follow_up: bool = False
    """Whether it failed because another rank was gone."""


def root_cause(ends: Iterable[RankEnd]) -> DrumlineError:
    """The failure that came first and is not the consequence of another."""
    return min(ends, key=lambda end: (end.follow_up, end.when, end.rank)).error


def error_message(error: BaseException, when: float) -> tuple[float, DrumlineError | None, str, str, bool]:
    """A rank's report of an exception to its launcher: when, an error of ours, a line, the traceback, follow-up."""
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    ours = error if isinstance(error, DrumlineError) else None
    return when, ours, text, traceback.format_exc(), is_follow_up(error)


def raised(rank: int, message: tuple[float, DrumlineError | None, str, str, bool]) -> RankEnd:
    """The end of a rank that raised an exception."""
    when, ours, text, details, follow_up = message
    kind = "memory" if any(symptom in text for symptom in _NO_MEMORY) else "exception"
    error = ours or RankFailed(
        f"rank {rank} failed: {text}", rank=rank, kind=kind, trace=f"traceback of rank {rank}:\n{_last(details)}"
    )
    return RankEnd(rank, when, error, follow_up)


def died(rank: int, code: int | None, when: float, trace: str = "", *, memory_ran_out: bool | None = None) -> RankEnd:
    """The end of a process without a word: by a signal, or by its own exit.

    `memory_ran_out`: whether the kernel has ended a process for lack of memory; None if that is not known.
    """
    trace = f"stack of rank {rank} when it crashed:\n{_last(_crashed_thread(trace))}" if trace.strip() else ""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        what, kind = f"rank {rank} was ended by signal {name}", "signal"
        if -code == signal.SIGKILL and memory_ran_out:
            what, kind = f"{what}: the kernel ran out of memory", "memory"
        elif -code == signal.SIGKILL and memory_ran_out is None:
            what += ", which the kernel also sends when memory runs out"
    else:
        what, kind = f"rank {rank} ended with exit code {code} before it was done", "exit"
    return RankEnd(rank, when - _SEEN_LATE, RankFailed(what, rank=rank, kind=kind, trace=trace))


def out_of_memory_kills() -> int | None:
    """Processes that the kernel has ended for lack of memory since it started; None if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _crashed_thread(trace: str) -> str:
    """The part of faulthandler's text about the thread that crashed."""
    blocks = trace.strip().split("\n\n")
    current = [block for block in blocks if block.startswith("Current thread")]
    return "\n".join((blocks[0], *current)) if current else trace


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines if len(lines) <= _LINES else [*lines[:4], "  ...", *lines[4 - _LINES :]])
