"""The measured timeline of a step: the spans of all ranks, on one clock where they share a host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.timeline import Timeline


def measured_timeline(results: Sequence[Mapping[str, Any]], *, meet: bool) -> Timeline:
    """Spans as the ranks recorded them, each from its own start of the step.

    Ranks of one host begin as far apart as they did, if they `meet` in every step: their clock is the same. The first
    rank of every host begins at 0.
    """
    first: dict[str, float] = {}
    for host, seconds in (r["began"] for r in results if r.get("began") and meet):
        first[host] = min(seconds, first.get(host, seconds))
    spans = []
    for r in results:
        host, seconds = r["began"] if r.get("began") and meet else ("", 0.0)
        late = seconds - first.get(host, 0.0)
        spans += [dataclasses.replace(s, start=s.start + late, end=s.end + late) if late else s for s in r["spans"]]
    note = f"step {results[0]['probed']}, recorded under the profiler, which slows it"
    return Timeline("measured", tuple(spans), notes=(note,))
