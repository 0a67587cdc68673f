"""Injects faults into chosen ranks, to see that a run survives them: `kill:1@5` kills rank 1 in step 5.

A list of faults, separated by commas: KIND[:RANK][@STEP][/PLACE][xN or !], such as `raise:0@3/backward`. Steps are
counted from 0. A fault occurs in the first attempt of a run; with `x3` in the first three attempts, with `!` in all of
them. `random:SECONDS` injects faults at random steps into random ranks, that far apart on average;
`random:SECONDS#SEED` draws others.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import InputError, nearest
from .rank_status import RankStatus, rank_status

CHAOS = "DRUMLINE_CHAOS"
"""The variable with the faults to inject into the ranks."""
ATTEMPT = "DRUMLINE_ATTEMPT"
"""The variable with the number of restarts so far."""
KINDS = {
    "raise": "an exception",
    "kill": "SIGKILL",
    "segv": "a segmentation fault",
    "abort": "SIGABRT",
    "exit": "os._exit(9)",
    "memory": "memory runs out",
    "stop": "SIGSTOP",
    "hang": "the rank sleeps and never calls the next collective",
    "lock": "a call in C that does not return and holds the interpreter lock",
    "slow": "half a second of sleep",
}
PLACES = ("start", "data", "forward", "backward", "communication", "optimizer", "waiting", "collective", "save", "end")
RANDOM_KINDS = ("kill", "kill", "raise", "segv", "exit", "stop")
_WORK = ("forward", "optimizer")
"""Where the work of a step begins: on ranks that compute, and on parameter servers."""
_ENTERED = {"starting": "start", "saving": "save", "ending": "end"}
_FORM = re.compile(
    r"(?P<kind>[a-z]+)(:(?P<rank>\d{1,6}))?(@(?P<step>\d{1,9}))?(/(?P<place>[a-z]+))?(x(?P<times>\d{1,3})|(?P<always>!))?"
)
_RANDOM = re.compile(r"random:(?P<seconds>\d{1,9}(\.\d{1,9})?)(#(?P<seed>\d{1,9}))?")


class InjectedError(RuntimeError):
    """The exception of the fault `raise`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject."""

    kind: str
    rank: int = 0
    step: int = 0
    place: str = ""
    """Empty: where the rank's work of the step begins."""
    attempts: float = 1
    """Attempts of the run in which it occurs: the first, the first n, or all."""


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
                raise InputError(f"--chaos {word}", rule="random:SECONDS with a time above 0")
            faults.append(RandomFaults(float(match["seconds"]), int(match["seed"] or 0)))
            continue
        match = _FORM.fullmatch(word)
        if match is None:
            raise InputError(
                f"--chaos {word}", rule="KIND[:RANK][@STEP][/PLACE][xN or !], or random:SECONDS", fix="kill:1@5"
            )
        kind, place = match["kind"], match["place"] or ""
        for value, known in ((kind, tuple(KINDS)), (place, PLACES)):
            if value and value not in known:
                raise InputError(f"--chaos {word}", rule=f"one of {', '.join(known)}", fix=nearest(value, known))
        attempts = float("inf") if match["always"] else float(match["times"] or 1)
        faults.append(Fault(kind, int(match["rank"] or 0), int(match["step"] or 0), place, attempts))
    return faults


def check_faults(text: str, *, processes: int, steps: int) -> None:
    """Refuse faults that a run cannot have: of a process that it does not start, or after its last step."""
    for fault in parse_faults(text):
        if isinstance(fault, RandomFaults):
            continue
        if fault.rank >= processes:
            raise InputError(
                f"--chaos {fault.kind}:{fault.rank}",
                rule=f"the run has {processes} processes, ranks 0 to {processes - 1}",
            )
        if fault.step >= steps and fault.place not in ("start", "end"):
            raise InputError(f"--chaos {fault.kind}@{fault.step}", rule=f"the run has {steps} steps, 0 to {steps - 1}")


def inject_from(environment: Mapping[str, str], *, rank: int, ranks: int) -> None:
    """Inject the faults that the launcher's variables ask for into this rank."""
    text = environment.get(CHAOS, "")
    if not text:
        return
    attempt = environment.get(ATTEMPT) or environment.get("TORCHELASTIC_RESTART_COUNT") or "0"
    injector = FaultInjector(
        parse_faults(text), rank=rank, ranks=ranks, attempt=int(attempt) if attempt.isdecimal() else 0
    )
    injector.follow(rank_status())


class FaultInjector:
    """Injects faults into this rank when its status reaches their step and place."""

    def __init__(self, faults: Sequence[Fault | RandomFaults], *, rank: int, ranks: int, attempt: int) -> None:
        self._rank, self._ranks, self._attempt = rank, ranks, attempt
        self._faults = [f for f in faults if isinstance(f, Fault) and f.rank == rank and attempt < f.attempts]
        self._random = [f for f in faults if isinstance(f, RandomFaults)]
        self._step = -1
        self._last: float | None = None
        """When the last step began."""

    def follow(self, status: RankStatus) -> None:
        """Watch the status of this rank, from its start on."""
        status.listener = self._on_change
        self._on_change("place", "starting")

    def _on_change(self, what: str, value: str) -> None:
        if what == "step":
            self._step = int(value)
            self._draw()
            return
        place = {"place": _ENTERED.get(value, ""), "collective": "collective"}.get(what, value)
        for fault in list(self._faults):
            if place in ((fault.place,) if fault.place else _WORK) and self._is_due(fault):
                self._faults.remove(fault)
                inject(fault.kind, self._rank)

    def _is_due(self, fault: Fault) -> bool:
        if fault.place in ("start", "end"):
            return True
        if fault.place in ("data", "save"):  # before and after the step that counts
            return self._step + 1 >= fault.step
        return 0 <= self._step >= fault.step

    def _draw(self) -> None:
        """All ranks draw the same numbers, so a fault reaches one of them. The first step of an attempt has none."""
        now = time.monotonic()
        elapsed, self._last = now - (self._last or now), now
        for chaos in self._random:
            draw = random.Random(f"{chaos.seed}/{self._attempt}/{self._step}")
            chance, rank, kind = draw.random(), draw.randrange(self._ranks), draw.choice(RANDOM_KINDS)
            if rank == self._rank and chance < min(0.5, elapsed / chaos.seconds):
                # an exception that comes twice after the same step ends a run: this is another one
                inject(kind, self._rank, f" in attempt {self._attempt}, step {self._step}")


def inject(kind: str, rank: int, note: str = "") -> None:
    """Let a fault happen in this process."""
    if kind == "raise":
        raise InjectedError(f"injected into rank {rank}{note}")
    if kind == "exit":
        os._exit(9)
    if kind in ("kill", "abort", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}[kind])
    elif kind == "segv":
        ctypes.string_at(0)
    elif kind == "memory":
        _run_out_of_memory()
    elif kind == "hang":
        while True:
            time.sleep(3600)
    elif kind == "lock":
        ctypes.PyDLL(None).sleep(3600)
    elif kind == "slow":
        time.sleep(0.5)


def _run_out_of_memory() -> None:
    """Allocate more than there can be, as a model that does not fit would."""
    import torch

    torch.empty(1 << 47, dtype=torch.uint8)
