"""A finding: something that this machine has or lacks, and what helps. `examine` collects all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
"""ok; it runs, but less or slower than it could; Drumline does not run until it is mended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    topic: str
    name: str
    value: str
    state: State = "ok"
    remedy: str = ""
    """A command or a change, for all that is not ok."""


def examine(on_topic: Callable[[str], None] = lambda topic: None) -> list[Finding]:
    """Look at everything; `on_topic` hears what is looked at next."""
    from . import hardware, surroundings

    found: list[Finding] = []
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "devices": hardware.devices,
        "memory": hardware.memory,
        "shared memory": hardware.shared_memory,
        "limits": hardware.limits,
        "disk": hardware.disk,
        "network": surroundings.network,
        "clock": surroundings.clock,
        "versions": surroundings.versions,
        "terminal": surroundings.terminal,
    }
    for topic, look in looks.items():
        on_topic(topic)
        found += look()
    return found
