"""What was timed so far, on disk, so that a measurement that was broken off goes on where it was.

One line for each case, appended when it is known. Lines of another device, another torch or an hour ago are not used.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .clock import Timing

HOUR = 3600.0
"""Machines change; what is older than this is measured again."""


class Journal:
    """The cases of one rank."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._path = path
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._stamp = f"{name}, torch {torch.__version__}"
        self._known: dict[str, Timing] = {}
        if path is not None and path.exists():
            self._read(path)

    @property
    def found(self) -> int:
        """How many cases an earlier run has left."""
        return len(self._known)

    def timed(self, key: tuple[object, ...], clock: Callable[[], Timing]) -> Timing:
        """The timing of a case: from the journal, or from the clock, and then it is written down."""
        name = " ".join(map(str, key))
        if name in self._known:
            return self._known[name]
        timing = clock()
        if self._path is not None:
            row = {"stamp": self._stamp, "when": time.time(), "case": name, **dataclasses.asdict(timing)}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
        return timing

    def _read(self, path: Path) -> None:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                young = time.time() - row["when"] < HOUR
                if young and row["stamp"] == self._stamp:
                    self._known[row["case"]] = Timing(float(row["seconds"]), float(row["spread"]))
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when it was broken off


def forget(journal: str) -> None:
    """All is measured: what the ranks have written down is not needed any more."""
    path = Path(journal)
    for part in path.parent.glob(f"{path.name}.*"):
        os.remove(part)
