"""Standard output and error that survive a closed pipe, a full disk and a narrow encoding.

A stream that fails is redirected to the null device, so nothing written later can fail. Whether the failure ends the
command is decided by its verb: a table that cannot be printed is an error, a training goes on without its screen.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from .errors import DrumlineError


class OutputFailed(DrumlineError):
    """Standard output cannot be written (exit code 1)."""

    def __init__(self, what: str, *, closed_pipe: bool = False) -> None:
        super().__init__(what)
        self.closed_pipe = closed_pipe
        """The reader has gone (`| head`): the command ends without an error."""


class GuardedStream:
    """A text stream that goes to the null device after its first failure.

    The failure is raised as OutputFailed, or, while `tolerant`, only reported on standard error, unless `silent`.
    """

    def __init__(self, stream: TextIO, name: str, *, tolerant: bool, silent: bool = False) -> None:
        self._stream, self._name, self._silent = stream, name, silent
        self.tolerant = tolerant
        self.failed = False
        self._raised: OutputFailed | None = None
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal must not fail on a path in UTF-8

    def write(self, text: str) -> int:
        """Write, or drop the text after a failure."""
        try:
            return len(text) if self.failed else self._stream.write(text)
        except OSError as e:
            self._give_up(e)
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what the stream has buffered."""
        try:
            self._stream.flush()
        except OSError as e:
            self._give_up(e)

    def check(self) -> None:
        """Flush, and raise a failure again that somebody caught: the parser of the command line tries streams."""
        self.flush()
        if self._raised is not None:
            raise self._raised

    def _give_up(self, e: OSError) -> None:
        if self.failed:
            return
        self.failed = True
        with suppress(OSError, ValueError):
            sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(sink, self._stream.fileno())
            os.close(sink)
            self._stream.flush()  # what is still buffered would fail again at exit
        closed = e.errno in (errno.EPIPE, None)
        what = f"{self._name} is closed" if closed else f"{self._name} cannot be written: {e.strerror}"
        if not self.tolerant:
            self._raised = OutputFailed(what, closed_pipe=closed)
            raise self._raised from None
        if not self._silent:
            print(f"drumline: {what}; the run goes on without it", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded_streams() -> Iterator[GuardedStream]:
    """Guard standard output, which is returned, and error. A closed one becomes the null device."""
    _open_closed_descriptors()
    out, err = sys.stdout, sys.stderr
    guarded: Any = GuardedStream(out or _null(), "standard output", tolerant=False)
    sys.stdout = guarded
    sys.stderr = _silent(err, "standard error")
    try:
        yield guarded
    finally:
        with suppress(OutputFailed):
            sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = out, err


@contextmanager
def tolerant_output() -> Iterator[None]:
    """Let the work inside go on if standard output fails."""
    out = sys.stdout
    if not isinstance(out, GuardedStream):
        yield
        return
    before, out.tolerant = out.tolerant, True
    try:
        yield
        out.flush()
    finally:
        out.tolerant = before


def tolerate_failing_streams() -> None:
    """In a rank's process, for good: its prints never end the training. The launcher reports the failure."""
    sys.stdout, sys.stderr = _silent(sys.stdout, "standard output"), _silent(sys.stderr, "standard error")


def _silent(stream: TextIO | None, name: str) -> Any:
    return GuardedStream(stream or _null(), name, tolerant=True, silent=True)


def _null() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # stays open like the stream that it replaces


def _open_closed_descriptors() -> None:
    """Open descriptors 0 to 2 where they are closed (`>&-`); else the next file or pipe would get their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
