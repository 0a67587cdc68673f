"""A config of another tool, whichever it is: DeepSpeed's or Accelerate's, told apart by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from . import accelerate, deepspeed
from .foreign import read_table
from .imported import Imported


def read(source: str | Path | Mapping[str, Any], devices: int) -> Imported:
    """What a config asks for on up to so many devices: those that it names itself, or all."""
    table, where = read_table(source)
    if not accelerate.is_accelerate(table):
        return deepspeed.read(source, devices)
    ranks = accelerate.ranks_of(table, where)
    if ranks is not None and ranks > devices:
        raise InputError(
            f"{where} is for {ranks} ranks",
            where=f"{where}: num_processes",
            rule=f"a rank needs a device: num_processes({ranks}) > devices({devices})",
            fix=f"--devices {ranks}",
        )
    return accelerate.read(source, ranks or devices)


def ranks_of(source: str | Path | Mapping[str, Any]) -> int | None:
    """How many ranks a config itself names; DeepSpeed's never do."""
    table, where = read_table(source)
    return accelerate.ranks_of(table, where) if accelerate.is_accelerate(table) else None
