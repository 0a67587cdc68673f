"""The current activity of this rank, in a small memory-mapped file that its launcher can read while the rank hangs.

The launcher names the file in DRUMLINE_STATUS; without it the status stays in this process, and a change costs less
than a microsecond. Writing to the file takes a few microseconds. A reader needs no lock: a counter is odd while a
record is written, and the reader tries again.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

STATUS = "DRUMLINE_STATUS"
"""The variable with the path of this rank's status file."""
SIZE = 1280
"""Bytes of a status file."""
_COUNTER = struct.Struct("<Q")
_HEAD = struct.Struct("<QdqqqqQBHH")
"""Write counter, time of the last change, step, calls started, calls ended, number in its group, group, place, phases
of this step, phases of the step before."""
_MOST_PHASES = 0xFFFF
BETWEEN = "between steps"
"""The place of a rank after a step, until its loop asks for the next batch: there runs the user's own code."""
_PLACES = ("starting", "training", "saving", "ending", "ended", BETWEEN)
_TEXT = 300
"""Bytes of each text."""
_COLLECTIVE, _SITE, _PHASE, _PEERS = 64, 64 + _TEXT, 64 + 2 * _TEXT, 64 + 3 * _TEXT
_Texts = tuple[tuple[int, str], ...]
"""New texts, by their offsets."""


@dataclass(frozen=True, slots=True)
class StatusReading:
    """The status of a rank at one moment."""

    changed: float
    """When it last changed, by `time.monotonic`."""
    place: str
    """`starting`, `training`, `between steps`, `saving`, `ending` or `ended`."""
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
    group: int = 0
    """A hash of the ranks that make that call together; 0 for a message between two ranks."""
    number: int = 0
    """Its number among the calls of this group."""
    peers: tuple[int, ...] = ()
    """The ranks whose calls it needs; empty if they are not known."""
    phases: int = 0
    """Phases begun since this step began."""
    phases_before: int = 0
    """Phases of the step before."""

    @property
    def in_step(self) -> bool:
        """Whether it is in a part of a step, and not in code of the user's between steps."""
        return self.place == "training" and self.phase != ""

    def __str__(self) -> str:
        at = f"step {self.step}" if self.step >= 0 else "before the first step"
        where = f"{self.place}, {at}" + (f", {self.phase}" if self.phase else "")
        if not self.calls:
            return f"{where}; no collective known"
        verb = "waits in" if self.in_collective else "last finished"
        return f"{where}; {verb} collective {self.calls}: {self.collective}" + (f" at {self.site}" if self.site else "")


class RankStatus:
    """Writes the status of this rank. Any thread may call it."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._memory: mmap.mmap | None = None
        self._counter: memoryview | None = None
        """The write counter in the file: an item of a view is set in a third of the time of `pack_into`."""
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, SIZE)
                self._memory = mmap.mmap(descriptor, SIZE)
                self._counter = memoryview(self._memory)[: _COUNTER.size].cast("Q")
            finally:
                os.close(descriptor)
        self._lock = threading.Lock()
        self._writes, self._step, self._started, self._ended, self._place = 2, -1, 0, 0, 0
        self._group = self._number = self._phases = self._phases_before = 0
        self._changed = time.monotonic()
        self._texts = {_COLLECTIVE: "", _SITE: "", _PHASE: "", _PEERS: ""}
        self.listener: Callable[[str, str], None] | None = None
        """Called after each change with (`place`, name), (`step`, number), (`phase`, name) or (`collective`, text)."""
        self._write()

    def place(self, name: str) -> str:
        """Enter another part of the run, one of the places of a reading. Returns the one before."""
        before, self._place = _PLACES[self._place], _PLACES.index(name)
        self._write()
        if self.listener is not None:
            self.listener("place", name)
        return before

    def batch_wanted(self) -> None:
        """The loop asks for its next batch: what it did after its last step is over."""
        if _PLACES[self._place] == BETWEEN:
            self.place("training")

    def step(self, number: int) -> None:
        """Begin a step."""
        self._step, self._place = number, _PLACES.index("training")
        self._phases_before, self._phases = self._phases, 0
        self._write()
        if self.listener is not None:
            self.listener("step", str(number))

    def phase(self, name: str) -> None:
        """Begin a part of a step."""
        with self._lock:
            self._phases = min(self._phases + 1, _MOST_PHASES)
            self._change(((_PHASE, name),))
        if self.listener is not None:
            self.listener("phase", name)

    def collective_started(
        self,
        text: str,
        site: str = "",
        *,
        group: int = 0,
        number: int = 0,
        peers: str = "",
        started: int = 1,
        ended: int = 0,
    ) -> None:
        """A collective was called, or a wait for a message began; `peers` is the text of `rank_list`.

        Since the last change `started` collectives have started, of which this is the last, and `ended` have ended.
        """
        texts = self._texts
        with self._lock:
            self._started += started
            self._ended += ended
            self._group, self._number = group, number
            if text == texts[_COLLECTIVE] and site == texts[_SITE] and peers == texts[_PEERS]:
                self._change(())
            else:
                self._change(((_COLLECTIVE, text), (_SITE, site), (_PEERS, peers)))
        if self.listener is not None:
            self.listener("collective", text)

    def collective_ended(self, count: int = 1) -> None:
        """The oldest collectives in progress have ended."""
        with self._lock:
            self._ended += count
            self._change(())

    def _write(self, texts: _Texts = ()) -> None:
        with self._lock:
            self._change(texts)

    def _change(self, texts: _Texts) -> None:
        self._changed, memory, counter = time.monotonic(), self._memory, self._counter
        if memory is None or counter is None:
            self._texts.update(texts)
            return
        self._writes = writes = self._writes + 2
        counter[0] = writes - 1
        for offset, text in texts:
            if self._texts[offset] != text:
                self._texts[offset] = text
                data = _encoded(text)
                memory[offset : offset + len(data)] = data
        counters = self._step, self._started, self._ended, self._number, self._group
        _HEAD.pack_into(memory, 0, writes, self._changed, *counters, self._place, self._phases, self._phases_before)

    def _head(self) -> tuple[float, ...]:
        counters = self._step, self._started, self._ended, self._number, self._group
        return self._writes, self._changed, *counters, self._place, self._phases, self._phases_before

    def packed(self) -> bytes:
        """The status as it is now, in the form of a status file."""
        memory = bytearray(SIZE)
        with self._lock:
            for offset, text in self._texts.items():
                data = _encoded(text)
                memory[offset : offset + len(data)] = data
            _HEAD.pack_into(memory, 0, *self._head())
        return bytes(memory)

    def read(self) -> StatusReading:
        """The status as it is now."""
        return parse_status(self.packed())


def read_status(path: str | Path) -> StatusReading | None:
    """The status in a file; None if the rank has not written one yet, or wrote all the time."""
    for _ in range(20):
        try:
            data = Path(path).read_bytes()
        except OSError:
            return None
        if len(data) == SIZE and (count := _HEAD.unpack_from(data)[0]) and count % 2 == 0:
            return parse_status(data)
        time.sleep(0.001)
    return None


def parse_status(data: bytes) -> StatusReading:
    """The status in the bytes of a status file."""
    _, changed, step, started, ended, number, group, place, phases, phases_before = _HEAD.unpack_from(data)
    return StatusReading(
        changed,
        _PLACES[min(place, len(_PLACES) - 1)],
        step,
        _text(data, _PHASE),
        started,
        started > ended,
        _text(data, _COLLECTIVE),
        _text(data, _SITE),
        group,
        number,
        _ranks(_text(data, _PEERS)),
        phases,
        phases_before,
    )


@lru_cache(maxsize=1024)
def _encoded(text: str) -> bytes:
    """A text with its length; `_text` reads it."""
    data = text.encode(errors="replace")[: _TEXT - 2]
    return struct.pack("<H", len(data)) + data


def _text(data: bytes, offset: int) -> str:
    (length,) = struct.unpack_from("<H", data, offset)
    return data[offset + 2 : offset + 2 + min(length, _TEXT - 2)].decode(errors="replace")


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks as a short text: `0-3,8`."""
    parts: list[str] = []
    for rank in sorted(ranks):
        first, _, last = parts[-1].partition("-") if parts else ("", "", "")
        if parts and rank == int(last or first) + 1:
            parts[-1] = f"{first}-{rank}"
        else:
            parts.append(str(rank))
    return ",".join(parts)


def _ranks(text: str) -> tuple[int, ...]:
    """The ranks of `rank_list`; a list that was cut loses its last part."""
    parts = text.split(",")
    whole = parts[:-1] if len(text) >= _TEXT - 2 else parts
    pairs = [part.partition("-") for part in whole if part]
    return tuple(rank for first, _, last in pairs for rank in range(int(first), int(last or first) + 1))


_this_rank: RankStatus | None = None


def rank_status() -> RankStatus:
    """The status of this process, made on first use."""
    global _this_rank
    if _this_rank is None:
        _this_rank = RankStatus(os.environ.get(STATUS))
    return _this_rank
