"""Watches ranks from outside: finds those that make no progress, by a limit that is learnt from their own steps.

Ranks write what they do to status files (comm/rank_status.py). A rank that is stopped, dead-locked or busy in a call
that never returns cannot report itself, so the launcher reads these files and the states of the processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..comm.hang_limit import START, SlowestStep, UnbrokenWatch
from ..comm.hang_report import STOPPED, HangReport, hang_report, ranks_behind
from ..comm.rank_status import BETWEEN, StatusReading, read_status
from ..comm.rendezvous import default_timeout
from ..core.errors import RankFailed

_BUSY = 6
"""Times START that ranks may load and compile before the steps are warm, if none waits for another."""
_AWAY = 1.0
"""Seconds between two looks from which on the launcher itself was away: its looks come a few times a second."""
_STACKS = 0.5
"""Seconds in which ranks write their stacks."""
_LINES = 30
"""Lines of a rank's stack that are shown."""


class HangWatch:
    """Tells when ranks make no progress. One watch serves one run; a restart makes it more patient.

    With `only_waits`, ranks are judged only while one waits in a collective, or for a message, of ours: programs that
    are not a training of the engine may compute or sleep as long as they like.
    """

    def __init__(self, timeout: float | None = None, *, only_waits: bool = False) -> None:
        self._fixed, self._only_waits = timeout, only_waits
        """Seconds, if the user chose them."""
        self._start = max(START, default_timeout())
        """Seconds that a rank may wait for another outside of warm steps."""
        self._allowed = 0.0
        """Seconds of silence that the last look allowed."""
        self._patience = 1.0
        self._folder = Path()
        self._pids: Mapping[int, int] = {}
        self._times = SlowestStep()
        self._looks = UnbrokenWatch(_AWAY)
        self._stopped: dict[int, float] = {}

    def begin(self, folder: Path, pids: Mapping[int, int]) -> None:
        """Watch the ranks whose status files are in `folder`."""
        self._folder, self._pids = folder, pids
        self._times.begin(time.monotonic())
        self._stopped.clear()

    def follow(self, pids: Mapping[int, int]) -> None:
        """Some ranks are other processes now."""
        self._pids = pids
        self._stopped.clear()
        self._times.note(-1, time.monotonic(), counts=False)

    def be_patient(self) -> None:
        """Allow twice the silence from now on: the last alarm may have been false."""
        self._patience *= 2

    @property
    def limit(self) -> float:
        """Seconds of silence allowed in warm steps."""
        return self._fixed or self._patience * self._times.limit

    def check(self) -> HangReport | None:
        """A report if the ranks hang. Called a few times a second."""
        now = time.monotonic()
        away = self._looks.look(now)
        if away:
            self._stopped.clear()
        readings = {rank: status for rank in self._pids if (status := read_status(status_path(self._folder, rank)))}
        states = {rank: process_state(pid) for rank, pid in self._pids.items()}
        in_steps = not away and all(s.place not in (BETWEEN, "saving") for s in readings.values())
        self._times.note(max((s.step for s in readings.values()), default=-1), now, counts=in_steps)
        self._allowed = self.limit
        for rank, state in states.items():
            if state not in STOPPED or self._only_waits:
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > self.limit:
                return hang_report(readings, states=states, silent_for=now - self._stopped[rank])
        working = [status for status in readings.values() if status.place != "ended"]
        if not working or (self._only_waits and not any(s.in_collective for s in working)):
            return None
        silence = now - max(self._looks.since, *(status.changed for status in working))
        self._allowed = self._allowed_in(working)
        if silence > self._allowed:
            return hang_report(readings, states=states, silent_for=silence)
        return None

    def _allowed_in(self, working: Sequence[StatusReading]) -> float:
        """Seconds of silence that are no hang now: more while all ranks compute, since none waits for another."""
        warm = all(s.place == "training" for s in working) and self._times.warm
        waiting = any(s.in_collective for s in working)
        if not any(s.calls for s in working):  # no call is known, as over NCCL
            waiting = any(working[rank].in_step for rank in ranks_behind(dict(enumerate(working))))
        if warm and (waiting or self._fixed):
            return self.limit
        return max(self._start, self.limit) * (1 if warm or waiting else _BUSY)

    def failure(self, report: HangReport) -> RankFailed:
        """The error for a hang, with the stack of every rank that can still write one."""
        for rank, pid in self._pids.items():
            if process_state(pid) not in (*STOPPED, "", "Z"):
                _send(pid, signal.SIGUSR2, rank)
        time.sleep(_STACKS)
        stacks = [text for rank in sorted(self._pids) if (text := self._stack(rank))]
        rank = report.suspects[0] if len(report.suspects) == 1 else -1
        return RankFailed(
            report.text,
            rule=f"a step may be silent for {self.limit:.0f} s ({'as asked' if self._fixed else 'learnt'})"
            if self._allowed == self.limit
            else f"outside of warm steps, ranks may be silent for {self._allowed:.0f} s",
            fix="--hang-timeout allows more" if self._allowed == self.limit else "DRUMLINE_TIMEOUT=SECONDS allows more",
            rank=rank,
            kind="hang",
            trace="\n".join(stacks),
        )

    def _stack(self, rank: int) -> str:
        try:
            lines = stack_path(self._folder, rank).read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        more = ["  ..."] if len(lines) > _LINES else []
        return "\n".join([f"stack of rank {rank}:", *lines[-_LINES:], *more]) if lines else ""


def status_path(folder: Path, rank: int) -> Path:
    """The status file of a rank."""
    return folder / f"status-{rank}"


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack, on request or when it crashes."""
    return folder / f"stack-{rank}"


def process_state(pid: int) -> str:
    """The letter of a process's state on Linux; empty if it has ended, or elsewhere."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text[text.rindex(")") + 2]


def _send(pid: int, number: signal.Signals, rank: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # it has just ended
        return
