"""What the trials mean: findings for what prevents a run, and for results that cannot be trusted."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import Finding
from .matrix import Trial

NEEDED = ("all_reduce float32", "broadcast", "all_gather", "barrier")
"""What a run on several ranks cannot do without; gloo on the CPU is the backend that everything falls back to."""


def judge(trials: Sequence[Trial]) -> list[Finding]:
    """Findings of the topic `backends`; what is merely refused stands in the matrix alone."""
    found = []
    for backend, device in dict.fromkeys((t.backend, t.device) for t in trials):
        column = [t for t in trials if (t.backend, t.device) == (backend, device)]
        works = sum(t.state == "ok" for t in column)
        name = f"{backend} {device}"
        broken = [t for t in column if t.state in ("wrong", "hangs", "aborts")]
        base = (backend, device) == ("gloo", "cpu")
        lacks = [t for t in column if base and t.operation in NEEDED and t.state != "ok"]
        # where others work, there was no time left for those that were not tried
        missing = [t for t in lacks if not works or t.state != "not tried"]
        if missing:
            first = missing[0]
            remedy = "look at the network findings; then reinstall torch"
            what = f"{first.operation} {first.state}: {first.why}"
            found.append(Finding("backends", name, what, "problem", remedy))
        elif broken:
            what = "; ".join(f"{t.operation} {t.state}" for t in broken)
            found.append(Finding("backends", name, what, "note", "use another backend for these operations"))
        elif lacks:
            what = f"{', '.join(t.operation for t in lacks)} not tried: {lacks[0].why}"
            found.append(Finding("backends", name, what, "note", "try again when the machine is less busy"))
        elif all(t.state == "not tried" for t in column):
            what, _, remedy = column[0].why.partition(": ")
            found.append(Finding("backends", name, what, "note" if remedy else "ok", remedy))
        elif works == 0:
            found.append(Finding("backends", name, column[0].why, "note", "use another backend"))
        else:
            found.append(Finding("backends", name, f"{works} of {len(column)} operations work"))
    return found
