"""Destinations of step records besides the screen, with the same fields: JSON lines, TensorBoard, Weights & Biases.

A destination that cannot be opened is refused before the training. One that fails later never ends the training.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ...core.errors import InputError
from ...reports.step_records import StepRecord, length_before, step_line


class Sink(ABC):
    """Receives the step records of a run."""

    @abstractmethod
    def write(self, record: StepRecord) -> None:
        """Write one step."""

    @abstractmethod
    def close(self) -> None:
        """Close it at the end of the run."""


class TolerantSink(Sink):
    """Passes records on to a sink that may fail; `notify` gets one sentence about the first failure.

    After an error of the disk later records are tried again, since disks get space again; any other error is the end.
    """

    def __init__(self, sink: Sink, notify: Callable[[str], None]) -> None:
        self._sink, self._notify = sink, notify
        self._ended = self._reported = False

    def write(self, record: StepRecord) -> None:
        """Write one step, if that is possible."""
        self._attempt(lambda: self._sink.write(record))

    def close(self) -> None:
        """Close it."""
        self._attempt(self._sink.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._ended:
            return
        try:
            action()
        except Exception as e:  # whatever a foreign package raises
            self._ended = not isinstance(e, OSError)
            if not self._reported:
                name, why = type(self._sink).__name__, f"{type(e).__name__}: {e}"
                self._notify(f"{name} failed ({why}); the training goes on without it")
            self._reported = True


class JsonLinesFile(Sink):
    """A file with one line per step, complete up to the last step even if the run is killed.

    `resume` appends to the file of an earlier run; steps that run again replace their old lines.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self._path, self._last = path, math.inf if resume else -1
        try:
            self._file: TextIO = path.open("a" if resume else "w", encoding="utf-8", buffering=1)
        except OSError as e:
            raise InputError(f"{path} cannot be written: {e.strerror}") from None

    def write(self, record: StepRecord) -> None:
        """Write one line."""
        if record.step <= self._last:  # the run was resumed or restarted, and this is its first step
            self._file.truncate(length_before(self._path, record.step))
            self._file.seek(0, os.SEEK_END)
        self._file.write(step_line(record))
        self._last = record.step

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonLinesStream(Sink):
    """JSON lines with every field, on a stream that stays open."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, record: StepRecord) -> None:
        """Write one line and flush."""
        self._stream.write(step_line(record, every=True))
        self._stream.flush()

    def close(self) -> None:
        """The stream is not ours."""


class TensorBoard(Sink):
    """TensorBoard scalars named after the record's fields."""

    def __init__(self, folder: str) -> None:
        _require("tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer: Any = SummaryWriter(folder)
        except OSError as e:
            raise InputError(f"--tensorboard {folder} cannot be written: {e.strerror}") from None

    def write(self, record: StepRecord) -> None:
        """Add one point per field."""
        for name, value in finite_numbers(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Wandb(Sink):
    """Weights & Biases: offline unless WANDB_MODE is set."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        _require("wandb", "--wandb")
        os.environ.setdefault("WANDB_MODE", "offline")
        wandb: Any = importlib.import_module("wandb")
        try:
            self._run = wandb.init(project="drumline", name=name, dir=str(folder), config=config)
        except Exception as e:  # its own errors, and those of its server
            raise InputError(f"--wandb: {type(e).__name__}: {e}") from None

    def write(self, record: StepRecord) -> None:
        """Log one row."""
        self._run.log(finite_numbers(record), step=record.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def finite_numbers(record: StepRecord) -> dict[str, float]:
    """The record's finite numeric fields; the lists of a step as `NAME_mean` and `NAME_max`."""
    values = dataclasses.asdict(record)
    for name in ("staleness", "wait_seconds"):
        if several := values.pop(name):
            values |= {f"{name}_mean": sum(several) / len(several), f"{name}_max": max(several)}
    return {k: float(v) for k, v in values.items() if k != "step" and isinstance(v, int | float) and math.isfinite(v)}


def _require(package: str, option: str) -> None:
    """Refuse an option whose package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{option} needs the package {package}, which is not installed", fix=f"pip install 'drumline[{package}]'"
        )
