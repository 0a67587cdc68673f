"""The record of one step: the numbers that the screen, the lines of JSON and the report of a run share."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from ..core import files
from ..core.errors import CorruptFile

STEPS = "steps.jsonl"
"""The file of a run folder with a record a line."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Rates are those of one device; what is not known is None, or 0 where the field says so."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int
    loss: float
    """Mean over the global batch."""
    grad_norm: float
    seconds: float
    samples: int
    """Of all ranks."""
    memory_bytes: float = 0.0
    """Most bytes of tensors alive so far on one rank; 0 where it was not measured."""
    memory_share: float | None = None
    """Of what one rank may use."""
    samples_per_second: float = 0.0
    tokens_per_second: float | None = None
    """Where samples are rows of whole numbers, as tokens are."""
    tflops: float | None = None
    """Operations of the model, in 10^12 a second; what is computed again does not count."""
    mfu: float | None = None
    """Share of the device's dense peak."""
    predicted_seconds: float | None = None
    drift: float | None = None
    """(measured - predicted) / predicted, over the last steps: above zero the run is slower than predicted."""
    eta_seconds: float = 0.0
    data_share: float = 0.0
    """Of the time that goes by in waiting for data."""
    slowest_rank: int | None = None
    slowest_phase: str = ""
    slowest_factor: float | None = None
    """How many times as long its own work takes as that of the fastest rank."""
    skipped: int = 0
    """Steps that were not applied so far."""
    checkpoint_age: float | None = None
    """Seconds since the last checkpoint was complete."""
    note: str = ""
    """What a person should look at: a spike of the loss, why a step was skipped."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """What such a file holds: all of it is checked at once, because a long training has many lines."""

    lines: tuple[StepRecord, ...]


def step_line(step: StepRecord, *, every: bool = False) -> str:
    """One line of JSON. Unless `every` field is asked for, defaults are left out: a long training has many lines."""
    values = [(f.name, getattr(step, f.name), f.default) for f in dataclasses.fields(step)]
    told = {name: value for name, value, default in values if every or value != default}
    return json.dumps(finite(told), allow_nan=False) + "\n"


def read_steps(path: Path) -> tuple[StepRecord, ...]:
    """The lines of a file back."""
    tables = []
    for i, line in enumerate(files.read_text(path).splitlines(), start=1):
        try:
            tables.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError) as e:
            raise CorruptFile(f"{path} is damaged", where=f"{path}, line {i}", rule=f"JSON: {e}") from None
    return files.from_plain(_Steps, {"lines": tables}, str(path), CorruptFile).lines


def earlier_steps(path: Path) -> tuple[StepRecord, ...]:
    """What a run that is gone on with has left; nothing where there is no file.

    A run that was killed, or whose disk was full, may have left half a line: that is no reason not to go on.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return ()
    tables = [table for table in map(_parsed, lines) if table is not None]
    return files.from_plain(_Steps, {"lines": tables}, str(path), CorruptFile).lines


def length_before(path: Path, first: int) -> int:
    """How many bytes of a file that grows hold whole lines of earlier steps than `first`."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        table = _parsed(line)
        if not line.endswith(b"\n") or (isinstance(table, dict) and table.get("step", -1) >= first):
            break
        length += len(line)
    return length


def _parsed(line: bytes) -> Any:
    """The JSON of a line; None for what is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def finite(value: Any) -> Any:
    """A training may diverge: JSON has no NaN, so such a number is written as its name, and reads back as a number."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
