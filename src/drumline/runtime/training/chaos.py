"""Injects faults into chosen ranks, to see that a run survives them: `kill:1@5` kills rank 1 in step 5.

A list of faults, separated by commas: KIND[:RANK][@STEP][/PLACE], such as `raise:0@3/backward`. Kinds: `raise`, `kill`,
`segv`, `exit`, `memory` (allocate until the kernel or the limit says no), `stop` (SIGSTOP), `hang` (sleep forever), `slow`
(half a second). Places: `start`, `forward` (the default), `backward`, `communication`, `optimizer`, `data`, `collective`,
`save`, `end`. A fault comes once: in the first attempt of a run, unless it ends with `!`, which repeats it after every
restart. `random:SECONDS` injects kills, stops and exceptions at random steps, that far apart on average, in any rank.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...comm.rank_status import RankStatus
from ...core.errors import InputError, nearest

CHAOS = "DRUMLINE_CHAOS"
"""The variable with the faults to inject, for ranks of any launcher."""
KINDS = ("raise", "kill", "segv", "exit", "memory", "stop", "hang", "slow")
PLACES = ("start", "forward", "backward", "communication", "optimizer", "data", "collective", "save", "end")
_ENTERED = {"starting": "start", "saving": "save", "ending": "end"}
_FORM = re.compile(r"(?P<kind>[a-z]+)(:(?P<rank>\d+))?(@(?P<step>\d+))?(/(?P<place>[a-z]+))?(?P<always>!)?")
_RANDOM = re.compile(r"random:(?P<seconds>\d+(\.\d+)?)(#(?P<seed>\d+))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject."""

    kind: str
    rank: int = 0
    step: int = 0
    place: str = "forward"
    always: bool = False
    """Whether it also comes after restarts."""


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """Faults at random steps."""

    seconds: float
    """Between two of them, on average."""
    seed: int = 0


def parse_faults(text: str) -> list[Fault | RandomFaults]:
    """Read a list of faults."""
    faults: list[Fault | RandomFaults] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if match := _RANDOM.fullmatch(word):
            if not float(match["seconds"]) > 0:
                raise InputError(f"--chaos {word}", rule="random:SECONDS with more than no time")
            faults.append(RandomFaults(float(match["seconds"]), int(match["seed"] or 0)))
            continue
        match = _FORM.fullmatch(word)
        if match is None:
            raise InputError(f"--chaos {word}", rule="KIND[:RANK][@STEP][/PLACE][!] or random:SECONDS")
        kind, place = match["kind"], match["place"] or "forward"
        for value, known in ((kind, KINDS), (place, PLACES)):
            if value not in known:
                raise InputError(f"--chaos {word}", rule=f"one of {', '.join(known)}", fix=nearest(value, known))
        faults.append(Fault(kind, int(match["rank"] or 0), int(match["step"] or 0), place, bool(match["always"])))
    return faults


class FaultInjector:
    """Injects faults into this rank when its status reaches their step and place."""

    def __init__(self, faults: Sequence[Fault | RandomFaults], *, rank: int, ranks: int, attempt: int) -> None:
        self._rank, self._ranks, self._attempt = rank, ranks, attempt
        self._faults = [f for f in faults if isinstance(f, Fault) and f.rank == rank and (f.always or not attempt)]
        self._random = [f for f in faults if isinstance(f, RandomFaults)]
        self._step, self._last = -1, time.monotonic()

    def watch(self, status: RankStatus) -> None:
        """Follow the status of this rank."""
        status.listener = self._on_change
        self._on_change("place", "starting")

    def _on_change(self, what: str, value: str) -> None:
        if what == "step":
            self._step = int(value)
            self._draw()
            return
        place = _ENTERED.get(value, "") if what == "place" else "collective" if what == "collective" else value
        for fault in list(self._faults):
            due = fault.place in ("start", "end", "save") or self._step >= fault.step
            if fault.place == place and due and (fault.place != "save" or self._step + 1 >= fault.step):
                self._faults.remove(fault)
                inject(fault.kind, self._rank)

    def _draw(self) -> None:
        """All ranks draw the same numbers, so at most one of them gets the fault."""
        now, elapsed = time.monotonic(), time.monotonic() - self._last
        self._last = now
        for chaos in self._random:
            draw = random.Random(f"{chaos.seed}/{self._attempt}/{self._step}")
            if draw.random() < min(0.5, elapsed / chaos.seconds) and draw.randrange(self._ranks) == self._rank:
                inject(draw.choice(("kill", "kill", "raise", "segv", "exit")), self._rank)


def inject(kind: str, rank: int) -> None:
    """Let a fault happen in this process."""
    if kind == "raise":
        raise RuntimeError(f"injected into rank {rank}")
    if kind == "exit":
        os._exit(9)
    if kind in ("kill", "segv", "stop"):
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(kind)
        if number is None:
            ctypes.string_at(0)
        else:
            os.kill(os.getpid(), number)
    elif kind == "memory":
        raise MemoryError(f"injected into rank {rank}: cannot allocate")
    elif kind == "hang":
        while True:
            time.sleep(3600)
    elif kind == "slow":
        time.sleep(0.5)
