"""The record of one training step: the numbers on the screen, in JSON lines and in the report."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from ..core import files
from ..core.errors import CorruptFile
from ..core.regular_files import read_lines

STEPS = "steps.jsonl"
"""The file of a run folder with one record per line."""
_AT_ONCE = 10_000
"""Lines that are validated together."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Rates are per device; unknown values are None, or 0 where the field says so."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int
    loss: float
    """Mean over the global batch."""
    grad_norm: float
    seconds: float
    samples: int
    """Over all ranks."""
    memory_bytes: float = 0.0
    """Peak of live tensors so far on one rank; 0 if not measured."""
    memory_share: float | None = None
    """Share of the memory that one rank may use."""
    samples_per_second: float = 0.0
    tokens_per_second: float | None = None
    """If samples are rows of integers, as tokens are."""
    tflops: float | None = None
    """Model FLOPs in 10^12 per second; recomputation does not count."""
    mfu: float | None = None
    """Share of the device's dense peak."""
    predicted_seconds: float | None = None
    drift: float | None = None
    """(measured - predicted) / predicted over the last steps: above zero the run is slower than predicted."""
    eta_seconds: float = 0.0
    data_share: float = 0.0
    """Share of the time spent waiting for data."""
    slowest_rank: int | None = None
    slowest_phase: str = ""
    slowest_factor: float | None = None
    """Its own work relative to that of the fastest rank."""
    skipped: int = 0
    """Steps not applied so far."""
    checkpoint_age: float | None = None
    """Seconds since the last complete checkpoint."""
    note: str = ""
    """For the user's attention: a loss spike, why a step was skipped."""
    staleness: tuple[int, ...] = ()
    """For each gradient of this step, the updates between the weights that it was computed on and those that it was
    applied to. Empty where every rank waits for all others."""
    wait_seconds: tuple[float, ...] = ()
    """Seconds that each rank (or worker) waited for others since the last record that has them, by rank; empty if not
    measured."""
    worker: int | None = None
    """The worker whose gradient this is, where every gradient is an update."""
    dropped: int = 0
    """Gradients so far that came too late to be applied."""
    elapsed: float | None = None
    """Seconds since the first step of the run began; a resumed run continues to count."""
    mean_staleness: float | None = None
    """Over the gradients of the last steps; None where there is no staleness."""
    wait_share: float | None = None
    """Share of the time spent waiting for others in the last steps: the mean over ranks."""
    longest_wait_rank: int | None = None
    longest_wait_share: float | None = None
    """The rank that waited most, and its share."""
    network_share: float | None = None
    """Share of the time spent in messages that no rank was late for, and that computation did not hide."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Many lines, validated at once."""

    lines: tuple[StepRecord, ...]


def step_line(step: StepRecord, *, every: bool = False) -> str:
    """One line of JSON. Fields at their defaults are omitted, unless `every` field is asked for."""
    values = [(f.name, getattr(step, f.name), f.default) for f in dataclasses.fields(step)]
    fields = {name: value for name, value, default in values if every or value != default}
    return json.dumps(finite(fields), allow_nan=False) + "\n"


def read_steps(path: Path) -> tuple[StepRecord, ...]:
    """Read the records of a file of any length."""

    def tables() -> Iterator[Any]:
        for i, line in enumerate(read_lines(path), start=1):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as e:
                raise CorruptFile(f"{path} is damaged", where=f"{path}, line {i}", rule=f"JSON: {e}") from None

    return _records(path, tables())


def earlier_steps(path: Path) -> tuple[StepRecord, ...]:
    """The records of a run that is resumed; none if there is no file.

    A run that was killed, or whose disk was full, may have left half a line: it is ignored.
    """
    if not path.exists():
        return ()
    return _records(path, (table for table in map(_parsed, read_lines(path)) if table is not None))


def complete_steps(path: Path) -> tuple[tuple[StepRecord, ...], int, int]:
    """The records of a file that may be damaged: those that can be read, the number of lines that cannot, and the first
    of these lines (0 if there is none)."""
    records: list[StepRecord] = []
    bad, first = 0, 0
    numbered = ((i, _parsed(line)) for i, line in enumerate(read_lines(path), start=1) if line.strip())
    while part := list(itertools.islice(numbered, _AT_ONCE)):
        try:
            records += files.from_plain(_Steps, {"lines": [table for _, table in part]}, str(path), CorruptFile).lines
            continue
        except CorruptFile:
            pass  # some line of these is damaged: look at each
        for i, table in part:
            try:
                records += files.from_plain(_Steps, {"lines": [table]}, str(path), CorruptFile).lines
            except CorruptFile:
                bad, first = bad + 1, first or i
    return tuple(records), bad, first


def _records(path: Path, tables: Iterator[Any]) -> tuple[StepRecord, ...]:
    """Validate many lines at once, but not all of a long training: a line takes more memory than its record."""
    records: list[StepRecord] = []
    while part := list(itertools.islice(tables, _AT_ONCE)):
        records += files.from_plain(_Steps, {"lines": part}, str(path), CorruptFile).lines
    return tuple(records)


def length_before(path: Path, first: int) -> int:
    """Bytes of a file that hold complete lines of steps before `first`."""
    length = 0
    for line in read_lines(path):
        table = _parsed(line)
        if not line.endswith(b"\n") or (isinstance(table, dict) and table.get("step", -1) >= first):
            break
        length += len(line)
    return length


def _parsed(line: bytes) -> Any:
    """The JSON of a line; None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def finite(value: Any) -> Any:
    """Write NaN and infinity, which JSON lacks, as their names; they read back as numbers."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
