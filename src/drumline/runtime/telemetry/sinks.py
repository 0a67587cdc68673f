"""Destinations of step records besides the screen, with the same fields: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
from abc import ABC, abstractmethod
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
        """Write one line; a full disk must not end the training."""
        try:
            if record.step <= self._last:  # the run was resumed or restarted, and this is its first step
                self._file.truncate(length_before(self._path, record.step))
            self._last = record.step
            self._file.write(step_line(record))
        except OSError:
            return

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError:
            return


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

        self._writer: Any = SummaryWriter(folder)

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
        self._run = wandb.init(project="drumline", name=name, dir=str(folder), config=config)

    def write(self, record: StepRecord) -> None:
        """Log one row."""
        self._run.log(finite_numbers(record), step=record.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def finite_numbers(record: StepRecord) -> dict[str, float]:
    """The record's finite numeric fields."""
    values = dataclasses.asdict(record)
    return {k: float(v) for k, v in values.items() if k != "step" and isinstance(v, int | float) and math.isfinite(v)}


def _require(package: str, option: str) -> None:
    """Refuse an option whose package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{option} needs the package {package}, which is not installed", fix=f"pip install 'drumline[{package}]'"
        )
