"""Where records of steps go beside the screen, with the same fields: JSON lines, TensorBoard, Weights & Biases."""

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
from ...reports.steps import StepRecord, length_before, step_line


class Sink(ABC):
    """Takes the records of a run."""

    @abstractmethod
    def write(self, record: StepRecord) -> None:
        """One more step."""

    @abstractmethod
    def close(self) -> None:
        """The run has ended."""


class JsonFile(Sink):
    """A file that grows by a line a step, so that a run that ends early leaves what it had.

    A run that `goes_on` with the one of the file adds to it; steps that are taken once more replace what was there.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        self._path, self._cut = path, goes_on
        try:
            self._file: TextIO = path.open("a" if goes_on else "w", encoding="utf-8", buffering=1)
        except OSError as e:
            raise InputError(f"{path} cannot be written: {e.strerror}") from None

    def write(self, record: StepRecord) -> None:
        """One line; a full disk must not end a training."""
        try:
            if self._cut:  # only now is it known where the run goes on, and that it does
                self._file.truncate(length_before(self._path, record.step))
                self._cut = False
            self._file.write(step_line(record))
        except OSError:
            return

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError:
            return


class JsonStream(Sink):
    """Lines of JSON with every field on a stream that stays open."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, record: StepRecord) -> None:
        """One line, at once."""
        self._stream.write(step_line(record, every=True))
        self._stream.flush()

    def close(self) -> None:
        """The stream is not ours."""


class TensorBoard(Sink):
    """Scalars by the names of the record's fields."""

    def __init__(self, folder: str) -> None:
        _need("tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder)

    def write(self, record: StepRecord) -> None:
        """One point a field."""
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Wandb(Sink):
    """Weights & Biases: on this machine alone, unless WANDB_MODE says otherwise."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        _need("wandb", "--wandb")
        os.environ.setdefault("WANDB_MODE", "offline")
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project="drumline", name=name, dir=str(folder), config=config)

    def write(self, record: StepRecord) -> None:
        """One row."""
        self._run.log(numbers(record), step=record.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def numbers(record: StepRecord) -> dict[str, float]:
    """The fields that are finite numbers."""
    values = dataclasses.asdict(record)
    return {k: float(v) for k, v in values.items() if k != "step" and isinstance(v, int | float) and math.isfinite(v)}


def _need(package: str, option: str) -> None:
    """Refuse an option whose package is not there."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{option} needs the package {package}, which is not installed", fix=f"pip install 'drumline[{package}]'"
        )
