"""Hang detection inside the ranks, for launchers that do not watch them: torchrun, srun, mpiexec.

Every rank publishes its status through the store once a second. Ranks 0 and 1 read all of them: if no rank has made
progress for longer than the limit, the missing rank is reported with what every rank does, each rank prints its stacks,
and all processes end with exit code 5, so that the launcher can restart them. Where no call is known, as over NCCL, the
rank is named whose step or phase is behind.

The limit is learnt: five times the slowest step, at least 10 s; 300 s, or DRUMLINE_TIMEOUT if that is more, before the
steps are warm, outside of them, and where no rank is known to wait for another. Ranks that are all outside of steps and
in no call are never reported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from ..core.errors import GaveUp, InputError
from .hang_limit import START, SlowestStep, UnbrokenWatch
from .hang_report import HangReport, hang_report, ranks_behind
from .rank_status import BETWEEN, RankStatus, StatusReading, parse_status
from .rendezvous import default_timeout
from .signed_store import AlteredStore, SignedStore

HANG_TIMEOUT = "DRUMLINE_HANG_TIMEOUT"
"""The variable with the seconds without progress that are allowed; 0 switches the detection off."""
_INTERVAL = 1.0
"""Seconds between two beats."""
_MISSED = 4.0
"""Seconds without a beat after which a rank is silent."""
_AWAY = 2.5
"""Seconds between two looks from which on this process was away itself: stopped, or in a call that holds the lock."""
_WATCHERS = 2
"""Ranks that read the statuses of all: the first may be the one that hangs."""
_LAST_WORDS = 2.5
"""Seconds in which the other ranks see the report and print their stacks."""
_AGE = struct.Struct("<Qd")
_KEY = "drumline/heartbeat"


@dataclass(slots=True)
class _Beat:
    """The last beat of a rank."""

    count: int
    seen: float
    """When it arrived, by this rank's clock."""
    progress: float
    """When that rank's status last changed, by this rank's clock."""
    reading: StatusReading


class HangDetector:
    """Judges the statuses of all ranks. Has no clock and no store of its own."""

    def __init__(self, size: int, fixed: float | None = None) -> None:
        self._size, self._fixed = size, fixed
        self._start = max(START, default_timeout())
        self.looks = UnbrokenWatch(_AWAY)
        """Noted by every thread of this process, so that only a stop of the process is a break."""
        self._beats: dict[int, _Beat] = {}
        self._times = SlowestStep()
        self._outside: set[int] = set()
        """Ranks that were outside of their steps when they were heard last."""

    def add(self, rank: int, count: int, age: float, reading: StatusReading, now: float) -> None:
        """Note a beat whose status was `age` seconds old when it was sent."""
        last = self._beats.get(rank)
        if last is None or last.count != count:
            self._beats[rank] = _Beat(count, now, now - age, reading)
            (self._outside.add if reading.place in (BETWEEN, "saving") else self._outside.discard)(rank)
            in_steps = not self._outside and self.looks.since <= self._times.noted
            self._times.note(reading.step, now, counts=in_steps)

    def limit(self, now: float) -> float:
        """Seconds without progress that are allowed. The last words of a silent rank may be older than its steps."""
        if self._fixed is not None:
            return self._fixed
        heard = [beat for beat in self._beats.values() if now - beat.seen < _MISSED]
        warm = self._times.warm and all(beat.reading.place == "training" for beat in heard)
        return self._times.limit if warm else max(self._start, self._times.limit)

    def _allowed(self, readings: Mapping[int, StatusReading], now: float) -> float | None:
        """Seconds without progress that are no hang; None if no time would show one."""
        limit = self.limit(now)
        if any(reading.in_collective for reading in readings.values()):
            return limit
        if any(readings[rank].in_step for rank in ranks_behind(readings)):
            return limit
        if any(reading.in_step for reading in readings.values()):
            return limit if self._fixed is not None else max(START, limit)
        return None

    def judge(self, now: float) -> HangReport | None:
        """A report if no rank makes progress."""
        working = {rank: beat for rank, beat in self._beats.items() if beat.reading.place != "ended"}
        allowed = self._allowed({rank: beat.reading for rank, beat in working.items()}, now)
        if allowed is None:
            return None
        silence = now - max(self.looks.since, *(beat.progress for beat in working.values()))
        if silence <= allowed:
            return None
        readings = {rank: beat.reading for rank, beat in working.items() if now - beat.seen < _MISSED}
        return hang_report(readings, states=dict.fromkeys(range(self._size), ""), silent_for=silence)


class Heartbeat:
    """Publishes the status of this rank, and judges those of all ranks on the first two."""

    def __init__(self, store: dist.Store, rank: int, size: int, status: RankStatus, limit: float | None = None) -> None:
        self._store, self._rank, self._size, self._status = SignedStore(store), rank, size, status
        self._detector = HangDetector(size, limit)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._count = 0
        self._stored = time.monotonic()
        """When the store last answered."""

    def start(self) -> None:
        """Start the two threads."""
        for target in (self._beat, self._watch_store):
            self._threads.append(threading.Thread(target=target, name="drumline heartbeat", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """The group ends. A thread that is in torch's store when the interpreter ends would abort the process."""
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LAST_WORDS)

    def _beat(self) -> None:
        """Thread: publish, read and judge."""
        try:
            self._judge()
        except AlteredStore as e:
            self._end(str(e))

    def _judge(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store ends with the rank that has it
            while not self._stop.wait(_INTERVAL):
                self._detector.looks.look(time.monotonic())
                self._publish()
                if self._store.check([f"{_KEY}/hang"]) and self._store.get(f"{_KEY}/hang"):
                    self._end()
                if self._rank < _WATCHERS:
                    self._read_all()
                    report = self._judge_all()
                    if report is not None and not self._stop.is_set():
                        self._store.set(f"{_KEY}/hang", str(self._rank))
                        self._end(report.text)
                self._stored = time.monotonic()
            self._status.place("ended")
            self._publish()

    def _publish(self) -> None:
        self._count += 1
        age = _AGE.pack(self._count, time.monotonic() - self._status.read().changed)
        self._store.set(f"{_KEY}/{self._rank}", (age + self._status.packed()).hex())

    def _read_all(self) -> None:
        for rank in range(self._size):
            key = f"{_KEY}/{rank}"
            if self._store.check([key]):
                data = bytes.fromhex(self._store.get(key).decode())
                count, age = _AGE.unpack_from(data)
                self._detector.add(rank, count, age, parse_status(data[_AGE.size :]), time.monotonic())

    def _judge_all(self) -> HangReport | None:
        self._detector.looks.look(now := time.monotonic())
        return self._detector.judge(now)

    def _watch_store(self) -> None:
        """Thread: the rank that has the store may be the one that hangs, and then no read of the store returns."""
        while not self._stop.wait(_INTERVAL):
            if report := self.report_without_store(time.monotonic()):
                self._end(report)

    def report_without_store(self, now: float) -> str:
        """A report if the store does not answer, and this rank waits and makes no progress; empty if not.

        A rank that makes progress has a slow store, on a network disk for example: no rank hangs.
        """
        self._detector.looks.look(now)
        reading = self._status.read()
        silence = now - max(self._stored, reading.changed, self._detector.looks.since)
        if silence <= self._detector.limit(self._stored) or not reading.in_collective:
            return ""
        return (
            f"no progress for {silence:.0f} s, and the store does not answer: rank 0, or the process that has the "
            f"store, hangs\n  rank {self._rank}: {reading}"
        )

    def _end(self, report: str = "") -> None:
        """Print the report and the stacks of this rank, and end the process."""
        if report:
            print(f"drumline: {report}", file=sys.stderr, flush=True)
        print(f"drumline: stacks of rank {self._rank}:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        time.sleep(_LAST_WORDS if report or not self._rank else 0.2)
        os._exit(GaveUp.exit_code)


_heartbeat: Heartbeat | None = None


def start_heartbeat(
    make_store: Callable[[], dist.Store], rank: int, size: int, status: RankStatus, environment: Mapping[str, str]
) -> None:
    """Detect hangs from now on, unless DRUMLINE_HANG_TIMEOUT is 0. `make_store` gives a store of its own."""
    global _heartbeat
    text = environment.get(HANG_TIMEOUT, "")
    try:
        limit = float(text) if text else None
    except ValueError:
        limit = -1.0
    if limit is not None and not 0 <= limit < 1e9:
        raise InputError(f"{HANG_TIMEOUT}={text}", where="environment", rule="a number of seconds, or 0")
    if limit == 0:
        return
    stop_heartbeat()
    _heartbeat = Heartbeat(make_store(), rank, size, status, limit)
    _heartbeat.start()


def stop_heartbeat() -> None:
    """The group ends, so that silence is no hang."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stop()
        _heartbeat = None
