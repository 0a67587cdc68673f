"""Resume journal: timings written to disk, so that an interrupted measurement continues where it stopped.

One line per case, appended when it is timed. Lines of another device or torch, or older than an hour, are ignored.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from ..core.errors import InputError
from ..core.regular_files import read_text
from .timing import Timing

MAX_AGE_S = 3600.0
"""Seconds after which a case is measured again, because machines change."""


class ResumeJournal:
    """Timed cases of one rank."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._path = path
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._stamp = f"{name}, torch {torch.__version__}"
        self._known: dict[str, Timing] = {}
        if path is not None and path.exists():
            self._read(path)

    @property
    def known_cases(self) -> int:
        """Number of cases from an earlier run."""
        return len(self._known)

    def timed(self, key: tuple[object, ...], clock: Callable[[], Timing]) -> Timing:
        """The timing of a case: from the journal, or from `clock`, and then recorded."""
        name = " ".join(map(str, key))
        if name in self._known:
            return self._known[name]
        timing = clock()
        if self._path is not None:
            row = {"stamp": self._stamp, "when": time.time(), "case": name, **dataclasses.asdict(timing)}
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a", encoding="utf-8") as f:
                    f.write(json.dumps(row) + "\n")
            except OSError:  # a read-only home, a full disk: only an interrupted measurement would need it
                self._path = None
        return timing

    def _read(self, path: Path) -> None:
        try:
            lines = read_text(path).splitlines()
        except InputError:  # not readable: everything is measured again
            return
        for line in lines:
            try:
                row = json.loads(line)
                recent = time.time() - row["when"] < MAX_AGE_S
                if recent and row["stamp"] == self._stamp:
                    self._known[row["case"]] = Timing(float(row["seconds"]), float(row["spread"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # the line that was being written at the interruption


def delete_journal(journal: str) -> None:
    """Delete the journals of all ranks after a complete measurement."""
    path = Path(journal)
    for part in path.parent.glob(f"{path.name}.*"):
        with suppress(OSError):  # of another user: it is outdated after an hour
            os.remove(part)
