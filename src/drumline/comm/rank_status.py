"""What this rank does now, in a small memory-mapped file that its launcher can read while the rank hangs.

The launcher names the file in DRUMLINE_STATUS; without it the status stays in this process. Writing takes a few
microseconds and no lock: a counter is odd while a record is written, and a reader tries again.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STATUS = "DRUMLINE_STATUS"
"""The variable with the path of this rank's status file."""
SIZE = 1024
"""Bytes of a status file."""
_HEAD = struct.Struct("<QdqqqB")
"""Write counter, time of the last change, step, collectives started, collectives ended, where in the run it is."""
_PLACES = ("starting", "training", "saving", "ending", "ended")
_TEXT = 300
"""Bytes of each text."""
_COLLECTIVE, _SITE, _PHASE = 64, 64 + _TEXT, 64 + 2 * _TEXT


@dataclass(frozen=True, slots=True)
class StatusReading:
    """The status of a rank at one moment."""

    changed: float
    """When it last changed, by `time.monotonic`."""
    place: str
    """`starting`, `training`, `saving`, `ending` or `ended`."""
    step: int
    """The step it works on; -1 before the first."""
    phase: str
    """Part of the step: data, forward, backward, ..."""
    calls: int
    """Collectives that it has started."""
    in_collective: bool
    collective: str
    """The last collective, with its type and size."""
    site: str
    """The source line that made that call."""

    def __str__(self) -> str:
        at = f"step {self.step}" if self.step >= 0 else "before the first step"
        where = f"{self.place}, {at}" + (f", {self.phase}" if self.phase else "")
        if not self.calls:
            return f"{where}; no collective so far"
        verb = "waits in" if self.in_collective else "last finished"
        return f"{where}; {verb} collective {self.calls}: {self.collective}" + (f" at {self.site}" if self.site else "")


class RankStatus:
    """Writes the status of this rank."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE)
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, SIZE)
                self._memory = mmap.mmap(descriptor, SIZE)
            finally:
                os.close(descriptor)
        self._writes, self._step, self._started, self._ended, self._place = 0, -1, 0, 0, 0
        self.listener: Callable[[str, str], None] | None = None
        """Called after each change with (`place`, name), (`step`, number), (`phase`, name) or (`collective`, text)."""
        self._write()

    def place(self, name: str) -> None:
        """Enter another part of the run: `starting`, `training`, `saving`, `ending`, `ended`."""
        self._place = _PLACES.index(name)
        self._write()
        if self.listener is not None:
            self.listener("place", name)

    def step(self, number: int) -> None:
        """Begin a step."""
        self._step, self._place = number, _PLACES.index("training")
        self._write()
        if self.listener is not None:
            self.listener("step", str(number))

    def phase(self, name: str) -> None:
        """Begin a part of a step."""
        self._write({_PHASE: name})
        if self.listener is not None:
            self.listener("phase", name)

    def collective_started(self, text: str, site: str = "") -> None:
        """A collective was called."""
        self._started += 1
        self._write({_COLLECTIVE: text, _SITE: site})
        if self.listener is not None:
            self.listener("collective", text)

    def collective_ended(self) -> None:
        """The oldest collective in progress has ended."""
        self._ended += 1
        self._write()

    def _write(self, texts: dict[int, str] | None = None) -> None:
        memory = self._memory
        head = (time.monotonic(), self._step, self._started, self._ended, self._place)
        _HEAD.pack_into(memory, 0, self._writes + 1, *head)
        for offset, text in (texts or {}).items():
            data = text.encode(errors="replace")[: _TEXT - 2]
            struct.pack_into("<H", memory, offset, len(data))
            memory[offset + 2 : offset + 2 + len(data)] = data
        self._writes += 2
        _HEAD.pack_into(memory, 0, self._writes, *head)

    def read(self) -> StatusReading:
        """The status as it is now."""
        return _parse(bytes(self._memory))


def read_status(path: str | Path) -> StatusReading | None:
    """The status in a file; None if the rank has not written one yet, or wrote all the time."""
    for _ in range(20):
        try:
            data = Path(path).read_bytes()
        except OSError:
            return None
        if len(data) == SIZE and (count := _HEAD.unpack_from(data)[0]) and count % 2 == 0:
            return _parse(data)
        time.sleep(0.001)
    return None


def _parse(data: bytes) -> StatusReading:
    _, changed, step, started, ended, place = _HEAD.unpack_from(data)
    return StatusReading(
        changed,
        _PLACES[min(place, len(_PLACES) - 1)],
        step,
        _text(data, _PHASE),
        started,
        started > ended,
        _text(data, _COLLECTIVE),
        _text(data, _SITE),
    )


def _text(data: bytes, offset: int) -> str:
    (length,) = struct.unpack_from("<H", data, offset)
    return data[offset + 2 : offset + 2 + min(length, _TEXT - 2)].decode(errors="replace")


_this_rank: RankStatus | None = None


def rank_status() -> RankStatus:
    """The status of this process, made on first use."""
    global _this_rank
    if _this_rank is None:
        _this_rank = RankStatus(os.environ.get(STATUS))
    return _this_rank
