"""Timelines: spans on lanes of ranks, in one form for predicted and measured steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from . import files
from .display import NotebookValue
from .errors import CorruptFile
from .units import format_seconds

_STRICT = {"extra": "forbid"}  # pydantic's ConfigDict, which would cost its import here


@dataclass(frozen=True, slots=True)
class Span:
    """An activity on one lane of one rank, in seconds from the start of the step."""

    __pydantic_config__ = _STRICT

    rank: int
    lane: str
    """`compute`, `communication`, `data` or `link`."""
    name: str
    start: float
    end: float
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline(NotebookValue):
    """Spans of one step."""

    __pydantic_config__ = _STRICT

    origin: str
    """`predicted` or `measured`."""
    spans: tuple[Span, ...] = ()
    notes: tuple[str, ...] = field(default=())
    rank_counts: dict[int, int] = field(default_factory=dict)
    """How many ranks a drawn rank stands for, itself included, where others do the same; 1 where missing."""

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans."""
        return tuple(sorted({s.rank for s in self.spans}))

    @property
    def all_ranks(self) -> int:
        """The number of ranks, with those that are not drawn because they do the same as one that is."""
        return sum(self.rank_counts.get(rank, 1) for rank in self.ranks)

    def rank_label(self, rank: int) -> str:
        """`rank 8`, or `rank 8 (x 2048 ranks)` if it stands for others too."""
        count = self.rank_counts.get(rank, 1)
        return f"rank {rank}" + (f" (x {count} ranks)" if count > 1 else "")

    def busy_seconds(self, rank: int, lane: str) -> float:
        """The sum of the spans of one lane of one rank."""
        return sum(s.end - s.start for s in self.spans if s.rank == rank and s.lane == lane)

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        files.write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read the JSON form back."""
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)

    def to_chrome(self) -> str:
        """The trace-event form that Perfetto and chrome://tracing open."""
        lanes = {key: i for i, key in enumerate(sorted({(s.rank, s.lane) for s in self.spans}))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
            for (rank, lane), tid in lanes.items()
        ]
        events += [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": self.rank_label(rank)}}
            for rank in self.rank_counts
        ]
        events += [
            {
                "ph": "X",
                "name": s.name,
                "cat": self.origin,
                "pid": s.rank,
                "tid": lanes[s.rank, s.lane],
                "ts": 1e6 * s.start,
                "dur": 1e6 * (s.end - s.start),
                "args": {"bytes": s.bytes},
            }
            for s in self.spans
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def __str__(self) -> str:
        return f"{self.origin} timeline: {len(self.spans)} spans, {format_seconds(self.seconds)}"
