"""Findings of the doctor: properties of this machine, each with a remedy, and the verdict on the backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .backend_matrix import OperationTrial

FindingState = Literal["ok", "note", "problem"]
"""ok; limited or slower than it could be; Drumline does not run until it is fixed."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the doctor's report."""

    topic: str
    name: str
    value: str
    state: FindingState = "ok"
    remedy: str = ""
    """A command or a change, unless ok."""


def examine(on_topic: Callable[[str], None] = lambda topic: None) -> list[DoctorFinding]:
    """Examine all topics; `on_topic` is called with each."""
    from . import environment, hardware

    findings: list[DoctorFinding] = []
    topics: dict[str, Callable[[], Iterator[DoctorFinding]]] = {
        "devices": hardware.devices,
        "memory": hardware.memory,
        "shared memory": hardware.shared_memory,
        "limits": hardware.limits,
        "disk": hardware.disk,
        "network": environment.network,
        "clock": environment.clock,
        "versions": environment.versions,
        "terminal": environment.terminal,
    }
    for topic, examine_topic in topics.items():
        on_topic(topic)
        findings += examine_topic()
    return findings


NEEDED = ("all_reduce float32", "broadcast", "all_gather", "barrier")
"""Operations that a run on several ranks needs; gloo on the CPU is the fallback backend."""


def judge(trials: Sequence[OperationTrial]) -> list[DoctorFinding]:
    """Findings of the topic `backends`. Operations that are merely refused appear in the matrix only."""
    findings = []
    for backend, device in dict.fromkeys((t.backend, t.device) for t in trials):
        column = [t for t in trials if (t.backend, t.device) == (backend, device)]
        works = sum(t.state == "ok" for t in column)
        name = f"{backend} {device}"
        broken = [t for t in column if t.state in ("wrong", "hangs", "aborts")]
        base = (backend, device) == ("gloo", "cpu")
        lacks = [t for t in column if base and t.operation in NEEDED and t.state != "ok"]
        # if others work, the untested ones only ran out of time
        missing = [t for t in lacks if not works or t.state != "not tried"]
        if missing:
            first = missing[0]
            remedy = "check the network findings; then reinstall torch"
            what = f"{first.operation} {first.state}: {first.why}"
            findings.append(DoctorFinding("backends", name, what, "problem", remedy))
        elif broken:
            what = "; ".join(f"{t.operation} {t.state}" for t in broken)
            findings.append(DoctorFinding("backends", name, what, "note", "use another backend for these operations"))
        elif lacks:
            what = f"{', '.join(t.operation for t in lacks)} not tried: {lacks[0].why}"
            findings.append(DoctorFinding("backends", name, what, "note", "try again when the machine is less busy"))
        elif all(t.state == "not tried" for t in column):
            what, _, remedy = column[0].why.partition(": ")
            findings.append(DoctorFinding("backends", name, what, "note" if remedy else "ok", remedy))
        elif works == 0:
            findings.append(DoctorFinding("backends", name, column[0].why, "note", "use another backend"))
        else:
            findings.append(DoctorFinding("backends", name, f"{works} of {len(column)} operations work"))
    return findings
